"""`headrace quota`."""
