"""Finds the episode that crashes its worker, and runs it in a process of its own."""
