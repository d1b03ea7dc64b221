"""The inference worker: it generates tokens with the newest version of a policy."""
