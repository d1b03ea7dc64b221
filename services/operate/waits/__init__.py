"""Who waits for whom in a run, since when and why."""
