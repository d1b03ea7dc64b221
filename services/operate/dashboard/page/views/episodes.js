// Search and filter of episodes. The filters are the link.
import { html, useEffect, useRef } from "../vendor/htm-preact.js";
import { query, usePoll } from "../lib/api.js";
import { duration, number, range, reward, words } from "../lib/format.js";
import { Ago, Answer, EpisodeLink, Panel, Pill, VersionLink } from "../lib/parts.js";
import { change, link } from "../lib/route.js";
import { Pager, Table } from "../lib/table.js";
import { harmless } from "../lib/text.js";

const FILTERS = ["policy", "purpose", "state", "reward_min", "reward_max", "ending", "tokens_min", "tokens_max", "turns_min",
  "turns_max", "tool", "tool_failed", "version_min", "version_max", "origin", "code", "item", "text"];

// What the server knows: other values find nothing.
const STATES = ["running", "waiting", "ended"];
const PURPOSES = ["train", "evaluate"];
const ORIGINS = ["policy", "environment", "infrastructure", "operator", "agent"];

const trainedIn = (row) => Object.entries(row.trained_in ?? {});

const COLUMNS = [
  { key: "task", name: "Episode", left: true, show: (row) => html`<${EpisodeLink} task=${row.task} sample=${row.sample} />` },
  { key: "item", name: "Item", left: true, fixed: true, show: (row) => html`<a href=${link(["group", row.task])}>${harmless(row.item_id)}</a>` },
  { key: "state", name: "State", left: true, fixed: true, show: (row) => html`<${Pill} tone=${row.failure ? "bad" : ""}>${row.ending || row.state}<//>` },
  { key: "reward", name: "Reward", show: (row) => reward(row.reward) },
  { key: "turns", name: "Turns" },
  { key: "tokens", name: "Tokens" },
  { key: "seconds", name: "Time", show: (row) => duration(row.seconds) },
  { key: "versions", name: "Versions", fixed: true, show: (row) => range(row.oldest_version, row.newest_version) },
  { key: "trained", name: "Trained in", fixed: true, show: (row) => trainedIn(row).map(([policy, version]) => html`<${VersionLink} key=${policy} policy=${policy} version=${version} /> `) },
  { key: "tools", name: "Tools", left: true, fixed: true, show: (row) => html`${(row.tools ?? []).map((tool) => harmless(tool)).join(", ")}${row.tool_failures ? html` <${Pill} tone="bad">${row.tool_failures} failed<//>` : null}` },
  { key: "failure", name: "Failure", left: true, fixed: true, show: (row) => row.failure ? html`<b>${words(row.failure.origin)}</b> ${words(harmless(row.failure.code))}` : "" },
  { key: "ended", name: "Ended", show: (row) => html`<${Ago} at=${row.ended_at} />` },
];

const SNIPPET = { key: "snippet", name: "Found", left: true, fixed: true, show: (row) => harmless(row.snippet) };

function Field({ name, label, params, className = "", type = "text" }) {
  return html`<label class=${className}>${label}<input name=${name} type=${type} defaultValue=${params[name] ?? ""}
    inputmode=${className === "short" ? "decimal" : undefined} autocomplete="off" /></label>`;
}

function Choice({ name, label, params, options }) {
  return html`<label>${label}<select name=${name}>
    <option value="">any</option>
    ${options.map((one) => html`<option key=${one} value=${one} selected=${params[name] === one}>${words(harmless(one))}</option>`)}</select></label>`;
}

const withChosen = (options, chosen) => (chosen && !options.includes(chosen) ? [...options, chosen] : options);

function Filters({ params, run }) {
  const form = useRef(null);
  useEffect(() => {
    if (params.focus) form.current.querySelector("input[type=search]").focus();
  }, []);
  function submit(event) {
    event.preventDefault();
    const given = new FormData(form.current);
    change({ ...Object.fromEntries(FILTERS.map((name) => [name, given.get(name)])), cursor: null, focus: null });
  }
  const clear = () => {
    form.current.reset();
    change({ ...Object.fromEntries(FILTERS.map((name) => [name, null])), cursor: null, focus: null });
  };
  const endings = withChosen(Object.keys(run?.endings ?? {}), params.ending);
  const policies = (run?.policies ?? []).map((one) => one.name);
  return html`<form class="filters" ref=${form} onSubmit=${submit} role="search" aria-label="Filter episodes">
    <${Field} name="text" label="Text that was sampled" type="search" className="wide" params=${params} />
    <${Field} name="item" label="Item" params=${params} className="short" />
    <${Field} name="reward_min" label="Reward from" params=${params} className="short" /><${Field} name="reward_max" label="to" params=${params} className="short" />
    <${Field} name="version_min" label="Version from" params=${params} className="short" /><${Field} name="version_max" label="to" params=${params} className="short" />
    <${Field} name="tokens_min" label="Tokens from" params=${params} className="short" /><${Field} name="tokens_max" label="to" params=${params} className="short" />
    <${Field} name="turns_min" label="Turns from" params=${params} className="short" /><${Field} name="turns_max" label="to" params=${params} className="short" />
    <${Choice} name="ending" label="Ending" params=${params} options=${endings} />
    <${Choice} name="state" label="State" params=${params} options=${STATES} />
    <${Choice} name="purpose" label="Purpose" params=${params} options=${PURPOSES} />
    <${Choice} name="origin" label="Failure from" params=${params} options=${ORIGINS} />
    <${Field} name="code" label="Failure code" params=${params} className="short" />
    <${Field} name="tool" label="Tool" params=${params} className="short" />
    ${policies.length > 1 ? html`<${Choice} name="policy" label="Policy" params=${params} options=${policies} />` : html`<input type="hidden" name="policy" value=${params.policy ?? ""} />`}
    <label class="check"><input type="checkbox" name="tool_failed" value="1" defaultChecked=${params.tool_failed === "1"} />a tool failed</label>
    <button class="strong">Search</button><button type="button" onClick=${clear}>Clear</button>
  </form>`;
}

export function EpisodesPage({ route, run }) {
  const { params } = route;
  const asked = Object.fromEntries(FILTERS.map((name) => [name, params[name]]));
  const order = params.order ?? "-ended";
  const path = query("/api/episodes", { ...asked, order, cursor: params.cursor, limit: 100 });
  const poll = usePoll(path, params.text ? 0 : 5);
  const columns = params.text ? [COLUMNS[0], SNIPPET, ...COLUMNS.slice(1)] : COLUMNS;
  return html`<${Panel} title="Filter"><${Filters} key=${JSON.stringify(asked)} params=${params} run=${run.data} /><//>
    <${Answer} poll=${poll}>${(data) => html`<${Panel} title="Episodes" name="episodes" extra=${data.searched ? html`<span>searched ${number(data.searched.done)} of ${number(data.searched.total)}</span>` : null}>
      <${Table} label="Episodes" columns=${columns} rows=${data.items} id=${(row) => `${row.task}/${row.sample}`} order=${order}
        onOrder=${(next) => change({ order: next, cursor: null }, true)} tone=${(row) => (row.failure ? "bad" : "")} empty="No episode fits these filters." />
      <${Pager} list=${data} shown=${data.items.length} params=${params} /><//>`}<//>`;
}
