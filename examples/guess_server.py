"""An environment as an HTTP server, with the standard library only: guess a number.

python guess_server.py 8000     serves at http://127.0.0.1:8000; port 0 picks a free one

The server prints its port.
"""

import json
import random
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

episodes = {}  # episode name -> number, index of the last action, answer to it


def reset(request):
    highest = request["task"]["options"].get("highest", 10)
    number = random.Random(request["task"]["seed"]).randint(1, highest)
    answer = {"text": f"1 to {highest}?"}
    episodes[request["episode"]] = {"number": number, "index": 0, "answer": answer}
    return 200, answer


def step(request):
    episode = episodes.get(request["episode"])
    if episode is None:
        return 410, {"error": "no such episode"}
    if request["index"] == episode["index"]:  # a repeated request: the first answer was lost
        return 200, episode["answer"]
    if request["index"] != episode["index"] + 1:
        return 409, {"error": f"the last action was {episode['index']}"}
    right = request["action"].strip() == str(episode["number"])
    answer = {"text": "yes" if right else "no", "reward": float(right), "terminated": right}
    episode.update(index=request["index"], answer=answer)
    return 200, answer


def close(request):
    episodes.pop(request["episode"], None)
    return 200, {}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        verb = {"/reset": reset, "/step": step, "/close": close}.get(self.path)
        status, answer = verb(request) if verb else (404, {"error": self.path})
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
