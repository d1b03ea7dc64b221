"""`headrace run`: a whole recipe on one machine, from the broker to the learned policy."""
