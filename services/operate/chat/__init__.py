"""`headrace chat`: talk to a version in the terminal."""
