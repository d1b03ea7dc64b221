"""What a run needs around the services: the local stack, shipped recipes, tiny models."""
