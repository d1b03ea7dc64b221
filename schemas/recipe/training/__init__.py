"""Checks of how a policy learns, as far as the recipe shows it."""
