"""`headrace show`: shows what happened to a task, an episode, a batch or a version."""
