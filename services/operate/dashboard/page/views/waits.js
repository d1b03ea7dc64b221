// The wait graph: what the run waits for, since when, why, and what helps.
import { html, useMemo, useState } from "../vendor/htm-preact.js";
import { Answer, Copy, Panel, Pill, Since } from "../lib/parts.js";
import { link } from "../lib/route.js";
import { harmless } from "../lib/text.js";

const [WIDTH, HEIGHT, GAP_X, GAP_Y, EDGE] = [160, 44, 34, 10, 14];

// The column of a wait: one more than the last of those that wait for it. Causes come last.
export function place(waits) {
  const known = new Map(waits.map((one) => [one.id, one]));
  const waiting = new Map(waits.map((one) => [one.id, []]));
  for (const one of waits) for (const on of one.on) waiting.get(on)?.push(one.id);
  const columns = new Map();
  const column = (id, seen) => {
    if (columns.has(id)) return columns.get(id);
    if (seen.has(id)) return 0;
    const inner = new Set(seen).add(id);
    const found = Math.max(-1, ...waiting.get(id).map((other) => column(other, inner))) + 1;
    columns.set(id, found);
    return found;
  };
  for (const one of waits) column(one.id, new Set());
  const last = Math.max(0, ...columns.values());
  const filled = Array.from({ length: last + 1 }, () => []);
  for (const one of waits) filled[one.on.length || !waiting.get(one.id).length ? columns.get(one.id) : last].push(one);
  const row = new Map();
  for (const each of filled) {
    const wish = (one) => {
      const rows = waiting.get(one.id).map((id) => row.get(id)).filter((value) => value !== undefined);
      return rows.length ? rows.reduce((a, b) => a + b, 0) / rows.length : 0;
    };
    each.sort((a, b) => wish(a) - wish(b) || a.since - b.since).forEach((one, index) => row.set(one.id, index));
  }
  const at = new Map();
  filled.forEach((each, x) => each.forEach((one, y) => at.set(one.id, { x: EDGE + x * (WIDTH + GAP_X), y: EDGE + y * (HEIGHT + GAP_Y) })));
  const edges = waits.flatMap((one) => one.on.filter((on) => known.has(on)).map((on) => [one.id, on]));
  return { at, edges, width: 2 * EDGE + filled.length * (WIDTH + GAP_X) - GAP_X,
    height: 2 * EDGE + Math.max(1, ...filled.map((each) => each.length)) * (HEIGHT + GAP_Y) - GAP_Y };
}

// All that waits for one thing, by itself or by way of others.
export function chain(waits, root) {
  const found = new Set([root]);
  for (let grew = true; grew; ) {
    const more = waits.filter((one) => !found.has(one.id) && one.on.some((on) => found.has(on)));
    more.forEach((one) => found.add(one.id));
    grew = more.length > 0;
  }
  return found;
}

function target({ id, kind, name }) {
  const numbers = /(\d+)\/(\d+)/.exec(id);
  if (numbers && ["episode", "prompt", "action"].includes(kind)) return link(["episode", numbers[1], numbers[2]]);
  const number = /(\d+)/.exec(id);
  if (number && ["group", "task"].includes(kind)) return link(["group", number[1]]);
  if (kind === "worker" || kind === "service") return link(["workers"]);
  if (["trainer", "batch", "run"].includes(kind)) return link(["run"]);
  return kind === "broker" ? link(["topics"]) : name ? link(["waits"]) : "";
}

const curve = (from, to) => {
  const [x1, y1, x2, y2] = [from.x + WIDTH, from.y + HEIGHT / 2, to.x, to.y + HEIGHT / 2];
  const bend = Math.max(24, (x2 - x1) / 2);
  return `M${x1},${y1} C${x1 + bend},${y1} ${x2 - bend},${y2} ${x2},${y2}`;
};

function Graph({ waits, chosen, ahead }) {
  const plan = useMemo(() => place(waits), [waits]);
  const on = chosen === null ? new Set() : chain(waits, chosen);
  const size = { width: `${plan.width}px`, height: `${plan.height}px` };
  return html`<div class="scroll" tabindex="0" role="group" aria-label="Wait graph: who waits, on the left, for what, on the right">
    <div class=${`graph ${on.size ? "chosen" : ""}`} style=${size}>
      <svg width=${plan.width} height=${plan.height} aria-hidden="true">${plan.edges.map(([from, to]) => html`<path key=${`${from} ${to}`}
        class=${on.has(from) && on.has(to) ? "on" : ""} d=${curve(plan.at.get(from), plan.at.get(to))} />`)}</svg>
      ${waits.map((one) => html`<a key=${one.id} class=${`node ${one.on.length ? "" : "cause"} ${on.has(one.id) ? "on" : ""}`} href=${target(one)}
        title=${harmless(one.cause)} style=${{ left: `${plan.at.get(one.id).x}px`, top: `${plan.at.get(one.id).y}px` }}>
        <b>${harmless(one.name)}</b><small>${one.kind} · <${Since} at=${one.since} ahead=${ahead} /></small></a>`)}
    </div></div>`;
}

// The commands in a help text: all of it, or what stands between backticks.
export const commands = (help) => (help.startsWith("headrace ") ? [help] : [...help.matchAll(/`(headrace [^`]+)`/g)].map((hit) => hit[1]));

// A text in which backticks mark code.
const Prose = ({ text }) => harmless(text).split("`").map((part, index) => (index % 2 ? html`<code key=${index}>${part}</code>` : part));

function Root({ wait, waits, ahead, chosen, onChoose }) {
  const found = commands(wait.help);
  const behind = chain(waits, wait.id).size - 1;
  return html`<li class=${`root ${chosen ? "chosen" : ""}`}>
    <div class="since"><${Since} at=${wait.since} ahead=${ahead} /><small>${behind ? `${behind} wait for it` : "nothing waits for it"}</small></div>
    <div class="about"><button type="button" aria-pressed=${chosen ? "true" : "false"} onClick=${onChoose}>${harmless(wait.name)}</button> <${Pill}>${wait.kind}<//></div>
    <p class="cause"><${Prose} text=${wait.cause} /></p>
    <div class="help">${found.length === 1 && found[0] === wait.help ? null : html`<p class="muted"><${Prose} text=${wait.help} /></p>`}
      ${found.map((command) => html`<${Copy} key=${command} text=${command} />`)}</div>
  </li>`;
}

export function WaitsPage({ waits: poll }) {
  const [chosen, choose] = useState(null);
  const ahead = useMemo(() => (poll.data ? poll.data.at - Date.now() / 1000 : 0), [poll.data]);
  return html`<${Answer} poll=${poll}>${(data) => {
    const roots = data.waits.filter((one) => !one.on.length).sort((a, b) => a.since - b.since);
    const kept = roots.some((one) => one.id === chosen) ? chosen : null;
    if (!data.waits.length) return html`<${Panel} title="Waits"><p class="empty">Nothing waits. Everything that was asked for has been answered.</p><//>`;
    return html`<${Panel} title="What the run waits for, the oldest first" name="roots"><ol class="roots">
        ${roots.map((one) => html`<${Root} key=${one.id} wait=${one} waits=${data.waits} ahead=${ahead} chosen=${kept === one.id} onChoose=${() => choose(kept === one.id ? null : one.id)} />`)}</ol><//>
      <${Panel} title="Who waits for whom" name="graph"><${Graph} waits=${data.waits} chosen=${kept} ahead=${ahead} /><//>`;
  }}<//>`;
}
