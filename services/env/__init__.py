"""The env worker, and the adapters of environments."""
