"""What a trainer of any kind owes the log: batches in order, and a version of each. No torch."""
