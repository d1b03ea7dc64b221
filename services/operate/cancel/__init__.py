"""`headrace cancel`: cancel tasks."""
