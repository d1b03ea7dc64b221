"""Whole deployments in virtual time: the product's decisions, with models of engines and networks.

`catalogue.py` has the scenarios, and the place for a new one. docs/scale.md has their results.
"""
