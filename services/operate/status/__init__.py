"""`headrace status`: print how far a run is."""
