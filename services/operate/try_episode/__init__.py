"""`headrace try`: plays one episode in the terminal."""
