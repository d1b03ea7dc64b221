"""Tiny models for recipes that learn in seconds: configurations and tokenizers, no weights."""
