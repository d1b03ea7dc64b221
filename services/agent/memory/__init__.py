"""What the agent worker keeps of many live episodes."""
