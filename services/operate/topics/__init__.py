"""`headrace topics`: list a namespace's topics."""
