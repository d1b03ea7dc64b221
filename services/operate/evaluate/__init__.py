"""`headrace evaluate`: measure a version on a recipe's evaluation tasks."""
