"""Experiments: whole runs of recipes that differ in one thing, compared with intervals."""
