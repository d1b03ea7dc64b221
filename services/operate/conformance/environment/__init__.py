"""The rules for environments."""
