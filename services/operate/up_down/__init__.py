"""`headrace up` and `headrace down`: start and stop the local stack."""
