"""What the dashboard remembers of a log: numbers, short names and positions."""
