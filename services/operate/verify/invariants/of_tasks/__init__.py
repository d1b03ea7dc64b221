"""I1 for tasks: that each runs once, whole and in order, and for whom."""
