"""Turns of episodes as rows, for SQL and sinks."""
