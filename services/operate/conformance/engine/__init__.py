"""The rules for engines."""
