"""A program that tells everything that it knows: an agent (`agent`), or an MCP server (`mcp`)."""

import json
import os
import sys
import time

print(json.dumps(dict(os.environ)), file=sys.stderr, flush=True)
for name, value in os.environ.items():
    print(f"{name}={value}", file=sys.stderr, flush=True)
if sys.argv[1] == "agent":
    deadline = time.monotonic() + 60
    while not os.path.exists(sys.argv[3]) and time.monotonic() < deadline:
        time.sleep(0.02)  # so that its command line can be read
    print(json.dumps({"reward": 1.0, "rewards": {os.environ["API_KEY"]: 1.0}}))
    if "fails" in sys.stdin.read():
        print(f"the API refused {os.environ['API_KEY']!r}", file=sys.stderr)
        sys.exit(1)
else:
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("teller", log_level="ERROR")

    @server.tool()
    def ask(seed: int, payload: dict[str, object]) -> str:
        """Return what the server knows."""
        return json.dumps(dict(os.environ))

    server.run()
