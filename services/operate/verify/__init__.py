"""`headrace verify`: check the invariants of a run."""
