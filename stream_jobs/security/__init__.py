"""How a stream job authenticates."""
