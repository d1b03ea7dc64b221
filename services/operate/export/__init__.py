"""`headrace export`: write a version as a model folder."""
