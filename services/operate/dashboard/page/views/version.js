// One optimizer step: what it learned from, what it left out, and where its weights come from.
import { html } from "../vendor/htm-preact.js";
import { query, usePoll } from "../lib/api.js";
import { bytes, clock, duration, number, range, reward, signed, words } from "../lib/format.js";
import { Action, Answer, EpisodeLink, Facts, Histogram, Panel, Pill, Tile, VersionLink } from "../lib/parts.js";
import { link } from "../lib/route.js";
import { Pager, Table } from "../lib/table.js";
import { harmless } from "../lib/text.js";
import { interval } from "./run.js";

const SAMPLES = [
  { key: "task", name: "Episode", left: true, up: true, show: (row) => html`<${EpisodeLink} task=${row.task} sample=${row.sample} />` },
  { key: "reward", name: "Reward", show: (row) => reward(row.reward) },
  { key: "advantages", name: "Advantage", value: (row) => row.advantages?.[0], show: (row) => row.advantages?.map((one) => signed(one)).join(" ") || "–" },
  { key: "ending", name: "Ending", left: true, up: true, show: (row) => html`<${Pill}>${row.ending}<//>` },
  { key: "tokens", name: "Tokens" },
  { key: "versions", name: "Versions", value: (row) => row.versions?.[0], show: (row) => range(row.versions?.[0], row.versions?.at(-1)) },
  { key: "staleness", name: "Staleness" },
  { key: "use", name: "Use", title: "How often it had been trained on before" },
  { key: "weight", name: "Weight" },
  { key: "gone", name: "Note", left: true, show: (row) => harmless(row.gone) },
];

const DROPPED = [
  { key: "task", name: "What", left: true, up: true, show: (row) => row.sample < 0
    ? html`<a href=${link(["group", row.task])}>group ${row.task}</a>` : html`<${EpisodeLink} task=${row.task} sample=${row.sample} />` },
  { key: "reason", name: "Reason", left: true, up: true, show: (row) => html`<${Pill} tone="warn">${row.reason}<//>` },
];

const FILES = [
  { key: "role", name: "File", left: true, up: true },
  { key: "from", name: "From", show: (row) => row.from ?? "–" },
  { key: "to", name: "To" },
  { key: "bytes", name: "Size", show: (row) => bytes(row.bytes) },
  { key: "held", name: "Stored", left: true, show: (row) => (row.held === null ? "not checked" : row.held ? "yes" : "no") },
  { key: "sha256", name: "SHA-256", left: true, show: (row) => html`<code>${row.sha256.slice(0, 16)}</code>` },
];

function Steps({ data }) {
  const step = (name, to) => to === null ? null : html`<a data-step=${name} href=${link(["version", data.policy, to])}>${name === "previous" ? "←" : ""} version ${to} ${name === "next" ? "→" : ""}</a>`;
  const { policy, version } = data;
  return html`<div class="bar-row">${step("previous", data.previous)} ${step("next", data.next)}
    ${data.previous === null ? null : html`<a href=${link(["compare"], { policy, first: data.previous, second: version })}>Compare with version ${data.previous}</a>`}
    <a href=${link(["episodes"], { policy, version_min: version, version_max: version })}>Episodes that sampled from it</a>
    <span class="push"></span>
    <${Action} name="Evaluate" action="evaluate" body=${{ policy, version }} question=${`Evaluate version ${version} of ${policy}? This starts a command beside the dashboard.`} />
    <${Action} name="Replay up to here" action="replay" body=${{ policy, version }} question=${`Train versions 1 to ${version} of ${policy} again from the recorded batches, in a namespace of their own? This starts a command beside the dashboard.`} />
  </div>`;
}

function Metrics({ data, before }) {
  const rows = Object.entries(data.metrics).map(([name, value]) => ({ name, value, change: before?.metrics?.[name] === undefined ? null : value - before.metrics[name] }));
  const columns = [
    { key: "name", name: "Metric", left: true, up: true, show: (row) => words(row.name) },
    { key: "value", name: "Value" },
    { key: "change", name: "Since the last step", show: (row) => signed(row.change) },
  ];
  return html`<${Panel} title="Metrics"><${Table} label="Metrics" columns=${columns} rows=${rows} id=${(row) => row.name} empty="The trainer reported no metrics." /><//>`;
}

function Weights({ weights, publications }) {
  return html`<${Panel} title="Weights" extra=${weights ? html`<span>${bytes(weights.bytes)}</span>` : null}>
    ${weights ? html`<${Facts} items=${[["Base", harmless(weights.base)], ["Number format", weights.dtype], ["File format", weights.format], ["Digest", html`<code>${weights.digest.slice(0, 16)}</code>`]]} />
      <${Table} label="Files of the weights" columns=${FILES} rows=${weights.files} empty="No files are recorded." />` : html`<p class="empty">No weights were published with this version.</p>`}
    <${Table} label="Publications" rows=${publications} columns=${[
      { key: "at", name: "Published", left: true, show: (row) => clock(row.at) },
      { key: "status", name: "Status", left: true, show: (row) => html`<${Pill}>${row.status}<//>` },
      { key: "writer", name: "By", left: true, show: (row) => harmless(row.writer) },
      { key: "location", name: "Record", left: true, show: (row) => html`<a href=${link(["record"], { at: row.location })}>${row.location}</a>` }]} />
  <//>`;
}

const summed = (items) => Object.entries(items.reduce((all, { reason }) => ({ ...all, [reason]: (all[reason] ?? 0) + 1 }), {}));

export function VersionPage({ route }) {
  const [policy, version] = route.parts;
  const poll = usePoll(query(`/api/versions/${encodeURIComponent(policy)}/${encodeURIComponent(version)}`, { limit: 100, cursor: route.params.cursor, dropped_cursor: route.params.dropped_cursor }), 10);
  const last = poll.data?.previous ?? null;
  const before = usePoll(last === null ? null : query(`/api/versions/${encodeURIComponent(policy)}/${last}`, { limit: 1 }), 0).data;
  return html`<${Answer} poll=${poll}>${(data) => html`
    <${Steps} data=${data} />
    ${data.remarks.length ? html`<ul class="remarks">${data.remarks.map((one) => html`<li key=${one}>${harmless(one)}</li>`)}</ul>` : null}
    <div class="tiles">
      <${Tile} name="Status" value=${words(data.status)} note=${clock(data.at)} />
      <${Tile} name="Reward" value=${reward(data.batch?.reward)} note=${before?.batch ? `${signed(data.batch?.reward - before.batch.reward)} since version ${data.previous}` : ""} />
      <${Tile} name="Samples" value=${number(data.samples.total)} note=${`${number(data.batch?.tokens)} tokens`} />
      <${Tile} name="Dropped" value=${number(data.dropped.total)} tone=${data.dropped.total ? "warn" : ""} note=${before ? `${number(before.dropped.total)} at version ${data.previous}` : ""} />
      <${Tile} name="Trainer waited" value=${duration(data.wait_s)} note=${before ? `${duration(before.wait_s)} at version ${data.previous}` : ""} />
      <${Tile} name="Step" value=${duration(data.step_s)} note=${`${number(data.updates)} updates`} />
      <${Tile} name="Evaluation" value=${data.evaluation ? `${(data.evaluation.avg.value * 100).toFixed(0)} %` : "–"} note=${data.evaluation ? interval(data.evaluation.avg) : "not evaluated"} />
    </div>
    <div class="columns">
      <${Panel} title="Rewards of its samples">${data.rewards.counts.length ? html`<${Histogram} name="Rewards" counts=${data.rewards.counts} edges=${data.rewards.edges} />` : html`<p class="empty">No rewards.</p>`}<//>
      <${Panel} title="Dropped" name="dropped" extra=${summed(data.dropped.items).map(([reason, count]) => html`<span key=${reason}>${words(reason)} ${count}</span>`)}>
        <${Table} label="Dropped" columns=${DROPPED} rows=${data.dropped.items} empty="This step dropped nothing." />
        ${data.dropped.next || route.params.dropped_cursor ? html`<${Pager} list=${data.dropped} shown=${data.dropped.items.length} name="dropped_cursor" params=${route.params} />` : null}<//>
    </div>
    <${Panel} title="Samples" name="samples" extra=${data.batch ? html`<a href=${link(["record"], { at: data.batch.location })}>${data.batch.location}</a>` : null}>
      <${Table} label="Samples" columns=${SAMPLES} rows=${data.samples.items} id=${(row) => `${row.task}/${row.sample}`} empty="This version has no batch." tone=${(row) => (row.gone ? "warn" : "")} />
      <${Pager} list=${data.samples} shown=${data.samples.items.length} params=${route.params} /><//>
    <div class="columns"><${Metrics} data=${data} before=${before} /><${Weights} weights=${data.weights} publications=${data.publications} /></div>`}<//>`;
}
