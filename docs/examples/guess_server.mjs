// The same environment in JavaScript, with nothing but Node's own library.
//
// node guess_server.mjs 8000
import { createServer } from "node:http";

const episodes = new Map(); // name: the number, the index of the last action, and its answer

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
    if (index === open.index) return [200, open.answer]; // asked again
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
  const asked = JSON.parse(Buffer.concat(chunks));
  const [status, answer] = verb ? verb(asked) : [404, { error: request.url }];
  response.writeHead(status, { "Content-Type": "application/json" });
  response.end(JSON.stringify(answer));
});
server.listen(Number(process.argv[2]), "127.0.0.1", () => console.log(server.address().port));
