"""`headrace cost`: what the workers of a run cost, from the log alone."""
