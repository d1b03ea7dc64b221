"""Sandboxes: environments that run actions as untrusted code in hardened Docker containers."""
