"""`headrace track`: writes a run's curves to where people look."""
