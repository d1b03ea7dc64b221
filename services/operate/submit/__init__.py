"""`headrace submit`: submit tasks."""
