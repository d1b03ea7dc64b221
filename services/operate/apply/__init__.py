"""`headrace apply`: create a recipe's namespace and start its run."""
