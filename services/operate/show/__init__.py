"""`headrace show`: the story of a task, an episode, a batch or a version, from the log alone."""
