"""Checks of schemas and bytes that other programs wrote."""
