"""A tool server of the Model Context Protocol: a calculator, which scores the answers too.

python calculator_server.py          by its standard input and output
python calculator_server.py 8000     by HTTP, at http://127.0.0.1:8000/mcp
"""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("calculator", log_level="ERROR")


@server.tool()
def add(a: int, b: int) -> int:
    """Adds two integers."""
    return a + b


@server.tool()
def ask(seed: int, payload: dict) -> str:
    """Begins an episode."""
    return f"What is {seed} plus {payload['plus']}?"


@server.tool()
def score(answer: str, seed: int, payload: dict) -> float:
    """The reward of an answer."""
    return float(answer.strip() == str(seed + payload["plus"]))


if len(sys.argv) > 1:
    server.run("streamable-http", port=int(sys.argv[1]))
else:
    server.run()
