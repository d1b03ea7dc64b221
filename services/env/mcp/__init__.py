"""Tool servers of the Model Context Protocol as environments: a step calls their tools."""

from headrace.errors import UsageError

try:
    import mcp  # noqa: F401
except ImportError:
    raise UsageError("mcp is not installed: pip install 'headrace[mcp]'") from None
