"""Sandboxes: environments whose actions run as untrusted code in hardened Docker containers."""
