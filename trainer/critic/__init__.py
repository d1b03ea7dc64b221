"""The critic: a value head on the policy's hidden states, and advantages from its values by GAE."""
