"""The stream jobs: from results to groups, and from groups to batches."""
