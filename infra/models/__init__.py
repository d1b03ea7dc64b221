"""Tiny models for recipes that learn in seconds: configurations and tokenizer, no weights."""
