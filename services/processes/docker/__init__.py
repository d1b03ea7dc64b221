"""Containers: the engine that runs them, and what they may do."""
