"""The shipped data sets, which the task source reads items from."""
