"""`headrace doctor`: find out what is wrong."""
