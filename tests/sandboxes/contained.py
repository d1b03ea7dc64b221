"""A program that plays an episode from inside a container, and looks for ways out of it."""

import json
import os
import socket
import sys
import time
import urllib.request


def ask(messages: list[dict[str, str]]) -> str:
    """What the policy says."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {
            "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"],
            "Content-Type": "application/json",
        },
    )
    with urllib.request.urlopen(request) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def reaches(address: tuple[str, int]) -> bool:
    """Whether anybody answers there."""
    try:
        socket.create_connection(address, 2).close()
    except OSError:
        return False
    return True


def main() -> None:
    """Plays."""
    episode = json.load(sys.stdin)
    how = episode["payload"]["how"]
    said = ask([{"role": "user", "content": "hello"}])
    if how == "linger":
        print("lingering", file=sys.stderr)
        time.sleep(600)
    if how == "fail":
        print("nothing works here", file=sys.stderr)
        raise SystemExit(3)
    outside = [("1.1.1.1", 53), ("169.254.169.254", 80), ("127.0.0.1", episode["payload"]["port"])]
    rewards = {
        "outside": float(any(map(reaches, outside))),
        "root": float(os.getuid() == 0),
        "writes": float(os.access("/run/headrace", os.W_OK) or os.access("/etc", os.W_OK)),
        "secrets": float(any(name.startswith("HEADRACE_") for name in os.environ)),
    }
    print(json.dumps({"reward": float(said.startswith("answer")), "rewards": rewards}))


main()
