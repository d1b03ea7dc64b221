// The run: how it goes, by version and by time.
import { html, useMemo } from "../vendor/htm-preact.js";
import { query, usePoll } from "../lib/api.js";
import { Chart } from "../lib/chart.js";
import { clock, compact, duration, number, percent, reward, words } from "../lib/format.js";
import { Ago, Answer, Bar, EpisodeLink, Failure, Panel, Pill, PolicyChoice, Tile, VersionLink } from "../lib/parts.js";
import { go, link } from "../lib/route.js";
import { Pager, Table } from "../lib/table.js";
import { harmless } from "../lib/text.js";

export const interval = (one) => (one ? `${percent(one.value)} (${percent(one.low)} to ${percent(one.high)})` : "–");

function Tiles({ run, policy, waits }) {
  const { episodes, tasks, rates } = run;
  const roots = waits?.waits.filter((one) => !one.on.length) ?? [];
  const found = policy?.evaluation;
  return html`<div class="tiles">
    <${Tile} name="Reward" value=${reward(policy?.reward)} note=${policy ? `version ${policy.version}` : ""} href=${policy ? link(["version", policy.name, policy.version]) : null} />
    <${Tile} name="Evaluation" value=${found ? percent(found.avg.value) : "–"} note=${found ? `version ${found.version}, ${percent(found.avg.low)} to ${percent(found.avg.high)}` : "not evaluated yet"} />
    <${Tile} name="Staleness" value=${number(policy?.staleness)} note=${`${number(policy?.skipped ?? 0)} batches skipped`} />
    <${Tile} name="Episodes" value=${compact(episodes.ended)} note=${`${compact(episodes.live)} live, ${compact(tasks.ended)} of ${compact(tasks.submitted)} tasks`} href="#/episodes" />
    <${Tile} name="Tokens" value=${compact(episodes.tokens)} note=${`${compact(Math.round(rates.tokens_per_s))}/s in ${duration(rates.window_s)}`} />
    <${Tile} name="Failed episodes" value=${compact(episodes.failed)} tone=${episodes.failed ? "bad" : ""} note=${percent(episodes.ended ? episodes.failed / episodes.ended : 0)} href=${link(["episodes"], { ending: "failed" })} />
    <${Tile} name="Waits" value=${waits ? number(roots.length) : "–"} tone=${roots.length ? "warn" : ""} note=${roots[0] ? harmless(roots[0].name) : "nothing waits"} href="#/waits" />
  </div>`;
}

const merged = (series, versions) => (i) => `version ${series.first[i] === versions[i] ? versions[i] : `${series.first[i]} to ${versions[i]}`}`;

function VersionCharts({ policy }) {
  const names = "reward,staleness,tokens_per_s,wait_s,step_s,dropped,samples";
  const poll = usePoll(query("/api/series", { policy, names, points: 300 }), 4);
  return html`<${Answer} poll=${poll} rows=${6} className="charts">${(data) => html`<${Drawn} data=${data} />`}<//>`;
}

function Drawn({ data }) {
  const lines = useMemo(() => prepare(data), [data]);
  const spell = (version) => merged(data, data.versions)(data.versions.indexOf(version));
  const open = (index) => go(link(["version", data.policy, data.versions[index]]));
  const versions = { xs: data.versions, spell, onPick: open };
  const tested = data.evaluation;
  const openTested = (index) => go(link(["version", data.policy, tested[index].version]));
  return html`<div class="charts">
    <${Chart} title="Reward" ...${versions} lines=${lines.reward} format=${reward} />
    <${Chart} title="Evaluation" xs=${lines.tested} lines=${lines.evaluation} format=${percent} spell=${(one) => `version ${one}`} onPick=${openTested} empty="Not evaluated yet." />
    <${Chart} title="Staleness" ...${versions} lines=${lines.staleness} />
    <${Chart} title="Tokens per second" ...${versions} lines=${lines.tokens} format=${compact} />
    <${Chart} title="Trainer" ...${versions} lines=${lines.seconds} format=${duration} />
    <${Chart} title="Samples of a batch" ...${versions} lines=${lines.samples} />
  </div>`;
}

function prepare({ series, evaluation }) {
  const line = (name, key, band, colour) => {
    const one = series[key] ?? { mean: [], low: [], high: [] };
    return { name, values: one.mean, colour, ...(band ? { low: one.low, high: one.high } : {}) };
  };
  return {
    reward: [line("reward", "reward", true, "--c1")],
    staleness: [line("staleness", "staleness", true, "--c2")],
    tokens: [line("tokens", "tokens_per_s", false, "--c3")],
    seconds: [line("waits", "wait_s", false, "--c2"), line("works", "step_s", false, "--c1")],
    samples: [line("trained", "samples", false, "--c1"), line("dropped", "dropped", false, "--c5")],
    tested: evaluation.map((one) => one.version),
    evaluation: [{ name: "mean", dots: true, interval: true, values: evaluation.map((one) => one.avg.value),
      low: evaluation.map((one) => one.avg.low), high: evaluation.map((one) => one.avg.high), colour: "--c4" }],
  };
}

const LINES = 4;

function TimeCharts() {
  const poll = usePoll("/api/times?points=120", 5);
  return html`<${Answer} poll=${poll} rows=${3} className="charts">${(data) => html`<${Times} data=${data} />`}<//>`;
}

function Times({ data }) {
  const lines = useMemo(() => {
    const lag = data.lag ?? { at: [], services: {} };
    const most = ([, values]) => Math.max(0, ...values);
    const series = (all) => Object.entries(all).sort((a, b) => most(b) - most(a)).slice(0, LINES).map(([name, values]) => ({ name, values }));
    return { episodes: [{ name: "episodes", values: data.episodes, colour: "--c3" }], failures: series(data.failures),
      lagAt: lag.at, lag: series(lag.services) };
  }, [data]);
  return html`<div class="charts">
    <${Chart} title=${`Episodes in ${duration(data.step_s)}`} time xs=${data.at} lines=${lines.episodes} spell=${clock} />
    <${Chart} title="Failures by origin" time xs=${data.at} lines=${lines.failures} spell=${clock} empty="Nothing has failed." />
    <${Chart} title="Lag in records" time xs=${lines.lagAt} lines=${lines.lag} spell=${clock} format=${compact} empty="Not measured yet." />
  </div>`;
}

const VERSIONS = [
  { key: "version", name: "Version", left: true },
  { key: "status", name: "Status", left: true, show: (row) => html`<${Pill}>${row.status}<//>` },
  { key: "at", name: "Published", left: true, show: (row) => html`<${Ago} at=${row.at} />` },
  { key: "reward", name: "Reward", show: (row) => reward(row.reward) },
  { key: "samples", name: "Samples" },
  { key: "dropped", name: "Dropped" },
  { key: "tokens", name: "Tokens" },
  { key: "staleness", name: "Staleness" },
  { key: "wait_s", name: "Waited", show: (row) => duration(row.wait_s) },
  { key: "step_s", name: "Step", show: (row) => duration(row.step_s) },
  { key: "loss", name: "Loss", value: (row) => row.metrics?.loss },
];

function Versions({ policy, params }) {
  const poll = usePoll(query("/api/versions", { policy, cursor: params.cursor, limit: 50 }), 5);
  const columns = [{ ...VERSIONS[0], show: (row) => html`<${VersionLink} policy=${policy} version=${row.version} />` }, ...VERSIONS.slice(1)];
  return html`<${Panel} title="Versions" name="versions"><${Answer} poll=${poll} rows=${2}>${(data) => html`
    <${Table} label="Versions" columns=${columns} rows=${data.items} id=${(row) => row.version} initial="-version" empty="No optimizer step yet." />
    <${Pager} list=${data} shown=${data.items.length} params=${params} />`}<//><//>`;
}

const FAILURES = [
  { key: "origin", name: "Origin", left: true, up: true, show: (row) => html`<a href=${link(["episodes"], { origin: row.origin, code: row.code })}>${words(row.origin)}</a>` },
  { key: "code", name: "Code", left: true, up: true, show: (row) => words(harmless(row.code)) },
  { key: "count", name: "Count" },
  { key: "message", name: "First message", left: true, up: true, show: (row) => harmless(row.message) },
  { key: "task", name: "Episode", show: (row) => html`<${EpisodeLink} task=${row.task} sample=${row.sample} />` },
];

function Counted({ counts, href }) {
  const rows = Object.entries(counts).sort((a, b) => b[1] - a[1]);
  const all = rows.reduce((sum, [, count]) => sum + count, 0);
  if (!rows.length) return html`<p class="empty">Nothing yet.</p>`;
  return html`<dl class="facts">${rows.map(([name, count]) => html`<div key=${name}>
    <dt><a href=${href(name)}>${words(harmless(name))}</a></dt><dd><${Bar} share=${count / all} /> ${number(count)}</dd></div>`)}</dl>`;
}

export function RunPage({ route, run: poll, waits }) {
  return html`<${Answer} poll=${poll}>${(run) => {
    const names = run.policies.map((one) => one.name);
    const trained = run.policies.filter((one) => one.trained).map((one) => one.name);
    const chosen = route.params.policy ?? trained[0] ?? names[0];
    const policy = run.policies.find((one) => one.name === chosen);
    return html`
      <${PolicyChoice} policies=${names} chosen=${chosen} href=${(name) => link(["run"], { policy: name })} />
      ${run.hints.length ? html`<ul class="remarks">${run.hints.map((hint) => html`<li key=${hint}>${harmless(hint)}</li>`)}</ul>` : null}
      <${Tiles} run=${run} policy=${policy} waits=${waits.data} />
      ${policy ? html`<${VersionCharts} policy=${chosen} />` : null}
      <${TimeCharts} />
      <div class="columns">
        <${Panel} title="Endings" name="endings"><${Counted} counts=${run.endings} href=${(ending) => link(["episodes"], { ending })} /><//>
        <${Panel} title="Discarded" name="discarded"><${Counted} counts=${run.discarded} href=${(reason) => link(["discarded"], { reason })} /><//>
      </div>
      <${Panel} title="Failures" name="failures">
        <${Table} label="Failures" columns=${FAILURES} rows=${run.failures} id=${(row) => row.origin + row.code} initial="-count" empty="Nothing has failed." /><//>
      ${policy?.trained ? html`<${Versions} policy=${chosen} params=${route.params} />` : null}`;
  }}<//>`;
}
