"""The part of a recipe about the machines of a run."""
