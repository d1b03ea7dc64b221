"""Runs a part of a recorded run again, from its log, into a fresh namespace. See docs/replay.md."""
