"""`headrace recipe`: list the shipped recipes, or print one."""
