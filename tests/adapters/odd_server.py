"""A program that breaks the MCP protocol on its pipe, or ends early. Its argument says how."""

import json
import os
import signal
import subprocess
import sys
import time

kind = sys.argv[1]
if kind == "garbage":
    print("hello, this is no JSON", flush=True)
elif kind == "flood":
    sys.stdout.write("x" * (1 << 20))
    sys.stdout.flush()
elif kind == "exit":
    sys.exit(3)
elif kind == "stubborn":  # and so is its child
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen(["sleep", "600"])
    with open(sys.argv[2], "w") as file:
        file.write(json.dumps([os.getpid(), child.pid]))
time.sleep(600)
