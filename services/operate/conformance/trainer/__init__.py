"""The kit for trainers of other teams: known batches, kills, and rules that judge the outcome."""
