"""`headrace new`: makes a folder to start from."""
