"""Chooses where an agent worker sends its requests."""
