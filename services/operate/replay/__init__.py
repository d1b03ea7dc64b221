"""Replays a part of a recorded run from its log into a new namespace. See docs/replay.md."""
