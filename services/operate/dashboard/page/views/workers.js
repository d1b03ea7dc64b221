// Who is alive, what each worker serves, and the sandboxes.
import { html } from "../vendor/htm-preact.js";
import { usePoll } from "../lib/api.js";
import { duration, number } from "../lib/format.js";
import { Ago, Answer, Bar, Panel, Pill, Tile } from "../lib/parts.js";
import { link } from "../lib/route.js";
import { Table } from "../lib/table.js";
import { harmless } from "../lib/text.js";

const lost = (row) => row.suspected || (!row.alive && row.state !== "gone");
const state = (row) => (row.suspected ? "suspected" : lost(row) ? "lost" : row.leaving ? "leaving" : row.state);
const all = (row) => [...row.pools, ...row.environments];
const sum = (row, key) => all(row).reduce((total, one) => total + (one[key] ?? 0), 0);

const WORKERS = [
  { key: "worker", name: "Worker", left: true, up: true, show: (row) => harmless(row.worker) },
  { key: "service", name: "Service", left: true, up: true },
  { key: "state", name: "State", left: true, up: true, value: state, show: (row) => html`<${Pill}>${state(row)}<//>` },
  { key: "serves", name: "Serves", left: true, up: true, value: (row) => all(row).map((one) => harmless(one.policy ?? one.environment)).join(", ") },
  { key: "version", name: "Version", value: (row) => row.pools[0]?.version, show: (row) => row.pools.map((pool) => pool.version ?? "–").join(", ") || "–" },
  { key: "busy", name: "Slots in use", value: (row) => sum(row, "busy"), show: (row) => sum(row, "slots") ? html`<${Bar} share=${sum(row, "busy") / sum(row, "slots")} /> ${number(sum(row, "busy"))} of ${number(sum(row, "slots"))}` : "–" },
  { key: "waiting", name: "Waiting", value: (row) => sum(row, "waiting") },
  { key: "seconds", name: "Mean time", value: (row) => all(row)[0]?.seconds, show: (row) => duration(all(row)[0]?.seconds) },
  { key: "host", name: "Host", left: true, up: true, show: (row) => harmless(row.host) },
  { key: "since", name: "Began", left: true, show: (row) => html`<${Ago} at=${row.since} />` },
  { key: "seen_at", name: "Last seen", left: true, show: (row) => html`<${Ago} at=${row.seen_at} />` },
  { key: "reason", name: "Note", left: true, up: true, show: (row) => harmless(row.reason) },
];

const SANDBOXES = [
  { key: "instance", name: "Sandbox", left: true, up: true, show: (row) => episodeOf(row.instance) },
  { key: "worker", name: "Worker", left: true, up: true, show: (row) => harmless(row.worker) },
  { key: "host", name: "Host", left: true, up: true, show: (row) => harmless(row.host) },
  { key: "state", name: "State", left: true, up: true, show: (row) => html`<${Pill}>${row.state}<//>` },
  { key: "age_s", name: "Age", show: (row) => duration(row.age_s) },
  { key: "reason", name: "Note", left: true, up: true, show: (row) => harmless(row.reason) },
];

function episodeOf(instance) {
  const found = /^(\d+)[/-](\d+)\b/.exec(instance);
  return found ? html`<a href=${link(["episode", found[1], found[2]])}>${harmless(instance)}</a>` : harmless(instance);
}

export function WorkersPage({ run }) {
  const poll = usePoll("/api/workers", 3);
  return html`<${Answer} poll=${poll}>${(found) => {
    // With a run its workers end: they are not lost then.
    const over = run.data?.state === "ended";
    const data = over ? { ...found, workers: found.workers.map((one) => ({ ...one, state: one.alive ? one.state : "gone", suspected: false })) } : found;
    return html`
    <div class="tiles">
      <${Tile} name="Workers alive" value=${number(data.workers.filter((one) => one.alive).length)} note=${`of ${number(data.workers.length)}`} />
      <${Tile} name="Lost or suspected" value=${number(data.workers.filter(lost).length)} tone=${data.workers.some(lost) ? "bad" : ""} />
      <${Tile} name="Sandboxes" value=${number(data.sandboxes_total)} />
      ${Object.entries(data.versions).map(([policy, one]) => html`<${Tile} key=${policy} name=${`Newest of ${harmless(policy)}`} value=${number(one.newest)}
        note=${Object.entries(one.served).map(([version, count]) => `${count} serve ${version}`).join(", ")} />`)}
    </div>
    <${Panel} title="Workers" name="workers"><${Table} label="Workers" columns=${WORKERS} rows=${data.workers} id=${(row) => row.worker} initial="service" empty="No worker has reported." tone=${(row) => (lost(row) ? "bad" : row.leaving ? "warn" : "")} /><//>
    <${Panel} title="Sandboxes" name="sandboxes"><${Table} label="Sandboxes" columns=${SANDBOXES} rows=${data.sandboxes} id=${(row) => row.instance} initial="-age_s" empty="No sandbox is open." /><//>`;
  }}<//>`;
}
