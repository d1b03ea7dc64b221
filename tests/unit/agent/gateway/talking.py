"""A program that talks to its model by plain HTTP: what tests have the agent `command` run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any


def post(path: str, tree: Any, key: str | None = None) -> tuple[int, Any]:
    """Status and body of an answer."""
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + path,
        json.dumps(tree).encode(),
        {"Authorization": f"Bearer {key or os.environ['OPENAI_API_KEY']}"},
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def chat(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """The answer's message."""
    status, tree = post("/chat/completions", {"model": "policy", "messages": messages, **fields})
    if status != 200:
        raise SystemExit(f"{status}: {tree}")
    message: dict[str, Any] = tree["choices"][0]["message"]
    return message


def main() -> None:
    """Does what the task's payload says."""
    task = json.load(sys.stdin)
    how = task["payload"].get("how", "talk")
    hello = {"role": "user", "content": "hello"}
    if how == "talk":
        first = chat(hello)
        chat(hello, first, {"role": "user", "content": "more"})
        print("noise\n" + json.dumps({"reward": 0.5, "rewards": {"form": 1.0}}))
    elif how == "endless":
        while True:
            chat(hello)
    elif how == "fail":
        sys.exit("nothing works here")
    elif how == "secrets":
        told = {name for name in os.environ if "HEADRACE_" in name or name.endswith("_TOKEN")}
        print(json.dumps({"reward": float(told != {"HEADRACE_REPORT_KEY", "LISTED_TOKEN"})}))
    elif how == "report":
        for name in ("OPENAI_API_KEY", "HEADRACE_REPORT_KEY"):
            status, _ = post("/episode/reward", {"reward": float(len(name))}, os.environ[name])
            assert status == {"OPENAI_API_KEY": 403, "HEADRACE_REPORT_KEY": 200}[name], status
    elif how == "names":
        many = {"reward": 1.0, "rewards": dict.fromkeys(map(str, range(210_000)), 1.0)}
        assert post("/episode/reward", many, os.environ["HEADRACE_REPORT_KEY"])[0] == 400
        print(json.dumps({"reward": 1.0, "rewards": dict.fromkeys(map(str, range(1_000)), 1.0)}))
    elif how == "show":
        print(json.dumps({"reward": float(len(task["payload"]))}))
    elif how == "flood":
        for _ in range(200):
            print("x" * 65_536)
        print(json.dumps({"reward": 1.0}))
    elif how == "stranger":
        status, tree = post("/chat/completions", {}, key="guessed")
        print(json.dumps({"reward": status + (tree["error"]["code"] == "invalid_api_key")}))
    elif how == "leave children":
        command = [sys.executable, "-c", "import time; time.sleep(600)", task["payload"]["mark"]]
        subprocess.Popen(command, start_new_session=True)
        subprocess.Popen(command)
        chat(hello)
        if task["payload"].get("stay"):
            time.sleep(600)


if __name__ == "__main__":
    main()
