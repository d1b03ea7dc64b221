"""Hostile bytes: what anyone may write to a topic, and what must not come of it.

`python -m tests.fuzz [--messages N] [--seed K]` runs it at any length. A failure is printed with
the command that repeats it.
"""
