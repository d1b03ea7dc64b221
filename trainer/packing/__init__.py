"""Packs sequences into micro-batches without padding, and divides these among ranks. No torch."""
