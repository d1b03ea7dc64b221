"""A program that plays an episode from inside a container, and looks for ways out of it."""

import contextlib
import json
import os
import signal
import socket
import sys
import time
import urllib.error
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


def ask_again(messages: list[dict[str, str]]) -> str:
    """What the policy says, once the gateway has room."""
    until = time.monotonic() + 30
    while True:
        try:
            return ask(messages)
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def rewards_itself() -> bool:
    """Whether it can set its reward with what it finds in its container."""
    keys = [os.environ["OPENAI_API_KEY"], *(v for n, v in os.environ.items() if "REPORT" in n)]
    for key in keys:
        for path in ("reward", "end"):
            request = urllib.request.Request(
                f"{os.environ['OPENAI_BASE_URL']}/episode/{path}",
                b'{"reward": 1.0}',
                {"Authorization": "Bearer " + key},
            )
            try:
                urllib.request.urlopen(request).close()
            except urllib.error.HTTPError:
                continue
            return True
    return False


def knows(secret: str) -> bool:
    """Whether the task's answer is in a file, a variable or a command line that it can read."""
    paths = [
        f"/proc/{pid}/{what}" for pid in os.listdir("/proc") for what in ("environ", "cmdline")
    ]
    for folder in ("/run", "/tmp", "/workspace"):
        paths += [os.path.join(parent, n) for parent, _, names in os.walk(folder) for n in names]
    for path in paths:
        try:
            with open(path, "rb") as file:
                if secret.encode() in file.read(1 << 20):
                    return True
        except OSError:
            continue
    return False


def reaches(address: tuple[str, int]) -> bool:
    """Whether anybody answers there."""
    try:
        socket.create_connection(address, 2).close()
    except OSError:
        return False
    return True


def kills_all() -> None:
    while True:
        os.kill(-1, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)


def kills_the_others() -> None:
    """The relay, the keepers, and what else there is."""
    for pid in os.listdir("/proc"):
        if pid.isdigit() and int(pid) != os.getpid():
            for number in (signal.SIGKILL, signal.SIGSTOP):
                with contextlib.suppress(OSError):
                    os.kill(int(pid), number)


def takes_all_memory() -> None:
    held = []
    while True:
        held.append(bytearray(1 << 22))


def fills_its_folders() -> None:
    for folder in ("/workspace", "/tmp", "/dev/shm"):
        with contextlib.suppress(OSError), open(folder + "/f", "wb") as file:
            while True:
                file.write(bytes(1 << 20))


def forks() -> None:
    while True:
        try:
            os.fork()
        except OSError:
            os.kill(-1, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)


def leaves_daemons() -> None:
    for _ in range(4):
        if os.fork() == 0:
            os.setsid()
            while True:
                with contextlib.suppress(OSError):
                    os.kill(os.getppid(), 0)
                time.sleep(1)


def stops() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def floods_the_relay() -> None:
    """Hundreds of connections that send what nobody reads, and thousands that end at once."""
    port = int(os.environ["OPENAI_BASE_URL"].split(":")[2].split("/")[0])
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 4000000\r\n\r\n"
    held = []
    for number in range(1200):
        with contextlib.suppress(OSError):
            one = socket.create_connection(("127.0.0.1", port), 5)
            one.setblocking(False)
            if number < 400:
                held.append(one)
                for chunk in (head, *[b"[" * 65536] * 8):
                    one.send(chunk)
            else:
                one.close()
    for one in held:
        one.close()
    time.sleep(1)


HARMS = {
    "kill all": kills_all,
    "kill the others": kills_the_others,
    "take all memory": takes_all_memory,
    "fill its folders": fills_its_folders,
    "fork": forks,
    "leave daemons": leaves_daemons,
    "stop": stops,
    "flood the relay": floods_the_relay,
}
"""What the policy's code may do beside the program, as the same user."""


def main() -> None:
    """Plays."""
    episode = json.load(sys.stdin)
    how = episode["payload"]["how"]
    if how == "fail early":
        print("nothing works here", file=sys.stderr)
        raise SystemExit(3)
    said = ask([{"role": "user", "content": "hello"}])
    if how == "ask what can't be served":
        with contextlib.suppress(OSError):
            ask([{"role": "user", "content": "refuse this"}])
        return
    if how in HARMS:
        HARMS[how]()
        print(ask_again([{"role": "user", "content": "still there?"}]))
        return
    if how == "linger":
        print("lingering", file=sys.stderr)
        time.sleep(600)
    if how == "fail":
        print("nothing works here", file=sys.stderr)
        raise SystemExit(3)
    outside = [("1.1.1.1", 53), ("169.254.169.254", 80), ("127.0.0.1", episode["payload"]["port"])]
    found = {
        "outside": any(map(reaches, outside)),
        "root": os.getuid() == 0,
        "writes": os.access("/run/headrace", os.W_OK) or os.access("/etc", os.W_OK),
        "sockets": os.listdir("/run/headrace") != ["episode.json"],
        "secrets": any(name.startswith("HEADRACE_") for name in os.environ),
        "payload": sorted(episode["payload"]) != ["how", "port"],
        "answer": knows("-".join(("forty", "two"))),
        "reward": rewards_itself(),
    }
    print(
        json.dumps({"reward": 1.0, "said": said, "found": [n for n, yes in found.items() if yes]})
    )


if __name__ == "__main__":
    main()
