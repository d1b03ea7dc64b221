"""`headrace tail`: print events as they arrive."""
