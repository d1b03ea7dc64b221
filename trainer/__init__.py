"""The trainer: batches in, policy versions out. Any other program may take its place."""
