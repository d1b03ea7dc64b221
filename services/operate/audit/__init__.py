"""`headrace audit`: who did what to a run."""
