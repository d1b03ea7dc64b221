"""vLLM with one model in several processes, the ranks, each with a shard of it."""
