"""Blobs, weights, deltas, model folders and the Hub, LoRA, token masks of JSON schemas."""
