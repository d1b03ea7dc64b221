"""Seeded bugs: each takes one sentence of the design out of the code, and must be caught.

A mutant that the simulation can't tell from the sound code means that a promise is not checked.
`catalogue.py` has them, `recorded.json` the play and seed that catch each; `python -m
tests.simulation.mutants` lists them, runs one, or hunts for the cheapest seed that catches it.
"""
