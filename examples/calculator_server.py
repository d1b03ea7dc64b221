"""An MCP tool server: a calculator that also asks the question and scores the answer.

python calculator_server.py          serves over standard input and output
python calculator_server.py 8000     serves over HTTP at http://127.0.0.1:8000/mcp
"""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> int:
    """Add two integers."""
    return a + b


@server.tool()
def ask(seed: int, payload: dict) -> str:
    """Start an episode and return its question."""
    return f"What is {seed} plus {payload['plus']}?"


@server.tool()
def score(answer: str, seed: int, payload: dict) -> float:
    """Return the reward of an answer: 1.0 if it is right, else 0.0."""
    return float(answer.strip() == str(seed + payload["plus"]))


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
