// An environment as an HTTP server, with Node's standard library only: guess a number.
//
// node guess_server.mjs 8000     serves at http://127.0.0.1:8000; port 0 picks a free one
//
// The server prints its port.
import { createServer } from "node:http";

const episodes = new Map(); // episode name -> number, index of the last action, answer to it

const verbs = {
  "/reset": ({ episode, task }) => {
    const highest = task.options.highest ?? 10;
    const answer = { text: `1 to ${highest}?` };
    episodes.set(episode, { number: 1 + (task.seed % highest), index: 0, answer });
    return [200, answer];
  },
  "/step": ({ episode, index, action }) => {
    const open = episodes.get(episode);
    if (!open) return [410, { error: "no such episode" }];
    if (index === open.index) return [200, open.answer]; // a repeated request
    if (index !== open.index + 1) return [409, { error: `the last action was ${open.index}` }];
    const right = action.trim() === String(open.number);
    open.index = index;
    open.answer = { text: right ? "yes" : "no", reward: right ? 1 : 0, terminated: right };
    return [200, open.answer];
  },
  "/close": ({ episode }) => {
    episodes.delete(episode);
    return [200, {}];
  },
};

const server = createServer(async (request, response) => {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  const verb = verbs[request.url];
  const body = JSON.parse(Buffer.concat(chunks));
  const [status, answer] = verb ? verb(body) : [404, { error: request.url }];
  response.writeHead(status, { "Content-Type": "application/json" });
  response.end(JSON.stringify(answer));
});
server.listen(Number(process.argv[2]), "127.0.0.1", () => console.log(server.address().port));
