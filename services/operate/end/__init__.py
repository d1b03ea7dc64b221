"""`headrace end`: ends a run for good."""
