// Two versions of this run, or this run and another one.
import { html, useRef } from "../vendor/htm-preact.js";
import { query, usePoll } from "../lib/api.js";
import { Chart } from "../lib/chart.js";
import { duration, number, percent, reward, signed, words } from "../lib/format.js";
import { Answer, Empty, Histogram, Panel } from "../lib/parts.js";
import { change, link } from "../lib/route.js";
import { Table } from "../lib/table.js";
import { harmless } from "../lib/text.js";
import { interval } from "./run.js";

function Choice({ params, runs, versions }) {
  const form = useRef(null);
  function submit(event) {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(form.current));
    change(given.run ? { run: given.run, first: null, second: null } : { run: null, first: given.first, second: given.second });
  }
  const others = (runs?.items ?? []).filter((one) => !one.current);
  const newest = versions?.items[0]?.version;
  return html`<form class="filters" ref=${form} onSubmit=${submit} aria-label="What to compare">
    <label class="short">Version<input name="first" inputmode="numeric" required=${!params.run} defaultValue=${params.first ?? (newest ? newest - 1 : "")} /></label>
    <label class="short">and version<input name="second" inputmode="numeric" defaultValue=${params.second ?? newest ?? ""} /></label>
    <label>or this run and<select name="run"><option value="">(no other run)</option>
      ${others.map((one) => html`<option key=${one.namespace} value=${one.namespace} selected=${params.run === one.namespace}>${harmless(one.namespace)}</option>`)}</select></label>
    <button class="strong">Compare</button></form>`;
}

// Rows of two sides: name, first, second. Differences first, where both are numbers.
function Sides({ title, sides, of, show = number, better }) {
  const names = [...new Set(sides.flatMap((side) => Object.keys(of(side) ?? {})))];
  const rows = names.map((name) => {
    const [first, second] = sides.map((side) => of(side)?.[name] ?? null);
    return { name, first, second, change: typeof first === "number" && typeof second === "number" ? second - first : null };
  });
  const columns = [
    { key: "name", name: title, left: true, up: true, show: (row) => words(harmless(row.name)) },
    { key: "first", name: sides[0].name, show: (row) => show(row.first) },
    { key: "second", name: sides[1].name, show: (row) => show(row.second) },
    { key: "change", name: "Difference", show: (row) => signed(row.change) },
  ];
  return html`<${Panel} title=${title}><${Table} label=${title} columns=${columns} rows=${rows} id=${(row) => row.name} initial=${better ?? ""} empty="Nothing on either side." /><//>`;
}

const share = (one) => (one ? one.failed / Math.max(1, one.calls) : null);

function Versions({ data }) {
  const { sides, policy } = data;
  const whole = (side) => ({ reward: side.metrics.reward, episodes: side.episodes, tokens: side.tokens_mean, turns: side.turns_mean });
  const items = [
    { key: "item_id", name: "Item", left: true, up: true, show: (row) => html`<a href=${link(["episodes"], { item: row.item_id })}>${harmless(row.item_id)}</a>` },
    { key: "first", name: sides[0].name, value: (row) => row.first?.reward, show: (row) => reward(row.first?.reward) },
    { key: "second", name: sides[1].name, value: (row) => row.second?.reward, show: (row) => reward(row.second?.reward) },
    { key: "difference", name: "Difference", show: (row) => signed(row.difference) },
  ];
  return html`<div class="columns">
      ${sides.map((side) => html`<${Panel} key=${side.name} title=${`Rewards of ${side.name}`} extra=${html`<a href=${link(["version", policy, side.version])}>open</a><span>${duration(side.seconds_mean)} an episode</span>${side.evaluation ? html`<span>evaluation ${interval(side.evaluation.avg)}</span>` : null}`}>
        <${Histogram} name=${`Rewards of ${side.name}`} counts=${side.rewards.counts} edges=${side.rewards.edges} /><//>`)}
    </div>
    <div class="columns"><${Sides} title="In the mean" sides=${sides} of=${whole} /><${Sides} title="Share of failed tool calls" sides=${sides} show=${percent} better="-change"
        of=${(side) => Object.fromEntries(Object.entries(side.tools).map(([name, one]) => [name, share(one)]))} />
      <${Sides} title="Failures" sides=${sides} of=${(side) => side.failures} better="-change" /><${Sides} title="Endings" sides=${sides} of=${(side) => side.endings} better="-change" />
      <${Panel} title="Items that differ most" name="items"><${Table} label="Items" columns=${items} rows=${data.items} id=${(row) => row.item_id} empty="No item is on both sides." /><//>
      <${Sides} title="Metrics" sides=${sides} of=${(side) => side.metrics} /></div>`;
}

function Runs({ data }) {
  const { runs, versions } = data;
  const spell = (version) => `version ${version}`;
  const lines = (name) => runs.map((run, index) => ({ name: harmless(run.name), values: data.metrics[name][index] }));
  const facts = (run) => [...run.differences, ...run.changes];
  return html`${data.notes.length ? html`<ul class="remarks">${data.notes.map((note) => html`<li key=${note}>${harmless(note)}</li>`)}</ul>` : null}
    <div class="charts">${Object.keys(data.metrics).map((name) => html`<${Chart} key=${name} title=${words(name)} xs=${versions} lines=${lines(name)} spell=${spell} />`)}</div>
    <div class="columns"><${Sides} title="The last ten versions in the mean" sides=${runs} of=${(run) => run.means} />
      ${runs.slice(1).map((run) => html`<${Panel} key=${run.name} title=${`What differs in ${harmless(run.name)}`} name="changes">
        <ul class="changes">${facts(run).map((fact) => html`<li key=${fact}>${harmless(fact)}</li>`)}</ul><//>`)}</div>`;
}

export function ComparePage({ route, run }) {
  const { params } = route;
  const trained = run.data?.policies.find((one) => one.trained)?.name;
  const policy = params.policy ?? trained;
  const runs = usePoll("/api/runs", 0);
  const versions = usePoll(policy ? query("/api/versions", { policy, limit: 1 }) : null, 0);
  const asked = params.run || (params.first && params.second);
  const poll = usePoll(asked ? query("/api/compare", { policy, run: params.run, first: params.run ? null : params.first, second: params.run ? null : params.second }) : null, 0);
  return html`<${Panel} title="Compare"><${Choice} key=${JSON.stringify([params, versions.data?.items[0]?.version, runs.data?.items.length])} params=${params} runs=${runs.data} versions=${versions.data} /><//>
    ${asked ? html`<${Answer} poll=${poll}>${(data) => (data.kind === "runs" ? html`<${Runs} data=${data} />` : html`<${Versions} data=${data} />`)}<//>`
      : html`<${Empty}>Choose two versions of this run, or another run.<//>`}`;
}
