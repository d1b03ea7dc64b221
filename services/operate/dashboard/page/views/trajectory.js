// One episode: its transcript, tree of turns, calls, tokens and timeline.
import { html } from "../vendor/htm-preact.js";
import { query, usePoll } from "../lib/api.js";
import { clock, duration, number, reward, words } from "../lib/format.js";
import { Answer, Facts, Failure, Panel, Pill, Tabs, Tile, VersionLink } from "../lib/parts.js";
import { change, link } from "../lib/route.js";
import { Table } from "../lib/table.js";
import { harmless } from "../lib/text.js";
import { Artifact, named } from "./group.js";
import { Calls } from "./trajectory/calls.js";
import { Strip } from "./trajectory/strip.js";
import { Timeline } from "./trajectory/timeline.js";
import { Transcript } from "./trajectory/transcript.js";
import { leaves, path, Tree } from "./trajectory/tree.js";

const TABS = { transcript: "Transcript", tokens: "Tokens", timeline: "Timeline", calls: "Calls", details: "Details" };

function Bar({ data }) {
  const { task, sample, neighbours, attempts } = data;
  const step = (name, to) => {
    if (!to) return null;
    const [other, number_] = to.split("/");
    return html`<a data-step=${name} href=${link(["episode", other, number_])}>${name === "previous" ? "← " : ""}${to}${name === "next" ? " →" : ""}</a>`;
  };
  return html`<div class="bar-row">
    <${Pill} tone=${data.failure ? "bad" : ""}>${data.ending || data.state}<//>
    ${data.masked ? html`<${Pill} tone="warn">not trained on<//>` : null}
    <a href=${link(["group", task])}>group ${task}</a>
    <span class="muted">${harmless(data.item_id)} · ${harmless(data.environment)} · ${words(data.purpose)}</span>
    ${attempts.length > 1 ? html`<nav class="choice flat" aria-label="Attempt">${attempts.map((one) => html`<a key=${one.attempt}
      aria-current=${one.attempt === data.attempt ? "true" : undefined} href=${link(["episode", task, sample], { attempt: one.attempt })}>attempt ${one.attempt}${one.counts ? "" : " (does not count)"}</a>`)}</nav>` : null}
    <span class="push"></span>${step("previous", neighbours.previous)} ${step("next", neighbours.next)}</div>`;
}

function Tiles({ data }) {
  const tokens = data.policies.reduce((sum, one) => sum + one.tokens, 0);
  const verdict = data.group[0];
  const advantage = data.turns.map((turn) => turn.advantages?.[verdict?.policy]).find((one) => one !== undefined && one !== null);
  return html`<div class="tiles">
    <${Tile} name="Reward" value=${reward(data.reward)} note=${named(data.rewards)} />
    <${Tile} name="Advantage" value=${number(advantage)} note=${verdict ? `${words(verdict.verdict)} ${words(verdict.reason ?? "")}` : "no group yet"} />
    <${Tile} name="Turns" value=${number(data.turns.length)} note=${`${leaves(data.turns).length} branches`} />
    <${Tile} name="Sampled tokens" value=${number(tokens)} note=${data.policies.map((one) => harmless(one.policy)).join(", ")} />
    <${Tile} name="Took" value=${duration(data.seconds)} note=${`ended ${clock(data.ended_at)}`} />
    <${Tile} name="Oldest version" value=${html`${data.policies[0]?.oldest_version ?? "–"}`} note=${data.attempts.length > 1 ? `${data.attempts.length} attempts` : "one attempt"} />
  </div>`;
}

const JUDGES = [
  { key: "what", name: "Judge", left: true, up: true, show: (row) => harmless(row.what) },
  { key: "reward", name: "Reward", show: (row) => reward(row.reward) },
  { key: "run_s", name: "Time", show: (row) => duration(row.run_s) },
  { key: "failure", name: "Failure", left: true, fixed: true, show: (row) => html`<${Failure} failure=${row.failure} />` },
];

const ATTEMPTS = [
  { key: "attempt", name: "Attempt", up: true },
  { key: "counts", name: "Counts", left: true, show: (row) => (row.counts ? "yes" : "no") },
  { key: "ending", name: "Ending", left: true, up: true },
  { key: "at", name: "When", left: true, show: (row) => clock(row.at) },
  { key: "failures", name: "Failures", left: true, fixed: true, show: (row) => row.failures.length ? row.failures.map((one, i) => html`<${Failure} key=${i} failure=${one} />`) : "–" },
];

function Details({ data }) {
  const rewards = Object.entries(data.rewards).map(([name, value]) => [words(harmless(name)), reward(value)]);
  return html`<div class="columns">
    <${Panel} title="Rewards">${rewards.length ? html`<${Facts} items=${[["total", reward(data.reward)], ...rewards]} />` : html`<p class="empty">One reward: ${reward(data.reward)}.</p>`}
      ${data.judges.length ? html`<${Table} label="Judges" columns=${JUDGES} rows=${data.judges} />` : null}<//>
    <${Panel} title="Metrics and labels"><${Facts} items=${[...Object.entries(data.metrics), ...Object.entries(data.labels)].map(([name, value]) => [words(harmless(name)), typeof value === "number" ? number(value) : harmless(value)])} /><//>
    ${data.group.map((one) => html`<${Panel} key=${one.policy} title=${`In its group: ${harmless(one.policy)}`}><${Facts} items=${[
      ["Verdict", html`<${Pill}>${one.verdict}<//>`], ["Reason", one.reason ? words(one.reason) : null], ["Mean reward", reward(one.mean)],
      ["Trained in version", one.batch ? html`<${VersionLink} policy=${one.policy} version=${one.batch.version} />` : "not in a batch"]]} /><//>`)}
    <${Panel} title="Artifacts">${data.artifacts.length ? html`<div class="inside artifacts">${data.artifacts.map((one) => html`<${Artifact} key=${one.sha256 + one.name} artifact=${one} />`)}</div>` : html`<p class="empty">It left no artifacts.</p>`}<//>
  </div>
  <${Panel} title="Attempts"><${Table} label="Attempts" columns=${ATTEMPTS} rows=${data.attempts} id=${(row) => row.attempt} empty="One attempt." /><//>`;
}

function Page({ data, params }) {
  const tab = TABS[params.tab] ? params.tab : "transcript";
  const ends = leaves(data.turns);
  const wanted = Number(params.branch);
  const branch = data.turns.some((turn) => turn.index === wanted && params.branch !== undefined) ? wanted : ends.at(-1) ?? -1;
  const chosen = path(data.turns, branch);
  const of = { attempt: params.attempt };
  return html`<${Bar} data=${data} />
    ${data.remarks.length ? html`<ul class="remarks">${data.remarks.map((one) => html`<li key=${one}>${harmless(one)}</li>`)}</ul>` : null}
    ${data.failure ? html`<ul class="remarks bad"><li><${Failure} failure=${data.failure} /></li></ul>` : null}
    <${Tiles} data=${data} />
    <div class="trajectory">
      <aside><${Panel} title="Turns" name="tree"><${Tree} turns=${data.turns} branch=${branch} chosen=${chosen} params=${params} /><//></aside>
      <div class="main">
        <${Tabs} names=${TABS} chosen=${tab} label="Views of the episode" onChoose=${(name) => change({ tab: name, at: null, turn: null }, true)} />
        <div role="tabpanel" aria-label=${TABS[tab]} class="tabpanel">
          ${tab === "transcript" ? html`<${Transcript} data=${data} chosen=${chosen} turn=${params.turn} />`
          : tab === "tokens" ? html`<${Strip} key=${branch} data=${data} branch=${branch} attempt=${of.attempt} params=${params} />`
          : tab === "timeline" ? html`<${Timeline} data=${data} />`
          : tab === "calls" ? html`<${Calls} data=${data} />` : html`<${Details} data=${data} />`}
        </div>
      </div>
    </div>`;
}

export function TrajectoryPage({ route }) {
  const [task, sample] = route.parts.map((part) => encodeURIComponent(part));
  const poll = usePoll(query(`/api/episodes/${task}/${sample ?? 0}`, { attempt: route.params.attempt }), 5);
  return html`<${Answer} poll=${poll}>${(data) => html`<${Page} data=${data} params=${route.params} />`}<//>`;
}
