"""`python -m headrace.conformance`: checks that plug-ins keep their contracts."""
