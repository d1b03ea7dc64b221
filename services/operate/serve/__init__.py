"""`headrace serve`: run one service of a namespace."""
