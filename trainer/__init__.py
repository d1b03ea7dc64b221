"""The trainer: reads batches and publishes policy versions. Another program can replace it."""
