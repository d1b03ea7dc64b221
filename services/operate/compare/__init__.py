"""`headrace compare`: shows a run and its replays side by side."""
