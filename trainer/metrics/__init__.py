"""The metrics that a published version records."""
