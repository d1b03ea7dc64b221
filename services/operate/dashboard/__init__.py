"""`headrace dashboard`: a run as pages in a browser."""
