"""Follows single turns through the processes of a stack: where each microsecond goes."""
