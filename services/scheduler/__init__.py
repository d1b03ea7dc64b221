"""The scheduler: it decides when each episode starts."""
