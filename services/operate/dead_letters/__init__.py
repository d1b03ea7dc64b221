"""`headrace dead-letters`: list, show and redrive dead letters."""
