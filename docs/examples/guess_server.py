"""An environment in another process, with nothing but Python's own library: guess a number.

python guess_server.py 8000
"""

import json
import random
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

episodes = {}  # name: the number, the index of the last action, and its answer


def reset(asked):
    highest = asked["task"]["options"].get("highest", 10)
    number = random.Random(asked["task"]["seed"]).randint(1, highest)
    answer = {"text": f"1 to {highest}?"}
    episodes[asked["episode"]] = {"number": number, "index": 0, "answer": answer}
    return 200, answer


def step(asked):
    episode = episodes.get(asked["episode"])
    if episode is None:
        return 410, {"error": "no such episode"}
    if asked["index"] == episode["index"]:  # asked again: the answer was lost on its way
        return 200, episode["answer"]
    if asked["index"] != episode["index"] + 1:
        return 409, {"error": f"the last action was {episode['index']}"}
    right = asked["action"].strip() == str(episode["number"])
    answer = {"text": "yes" if right else "no", "reward": float(right), "terminated": right}
    episode.update(index=asked["index"], answer=answer)
    return 200, answer


def close(asked):
    episodes.pop(asked["episode"], None)
    return 200, {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        verb = {"/reset": reset, "/step": step, "/close": close}.get(self.path)
        status, answer = verb(asked) if verb else (404, {"error": self.path})
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
print(server.server_port, flush=True)
server.serve_forever()
