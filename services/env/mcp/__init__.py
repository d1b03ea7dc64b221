"""Tool servers of the Model Context Protocol as environments: a step calls their tools."""

from headrace.services.env.optional_imports import importing

with importing("mcp"):
    import mcp  # noqa: F401
