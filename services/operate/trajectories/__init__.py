"""`headrace trajectories`: exports recorded episodes in the formats of other tools."""
