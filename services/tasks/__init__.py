"""Data sets, the task source, how an item becomes a task, admission, cancellation."""
