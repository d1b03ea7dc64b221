"""Typed events in and out of a namespace's topics; readers; references."""
