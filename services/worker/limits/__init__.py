"""Limits that hold over all workers of a run together, as a worker keeps them."""
