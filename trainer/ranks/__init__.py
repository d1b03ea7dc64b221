"""Training one model in several processes, each of which holds a shard of it."""
