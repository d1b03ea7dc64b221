// What was not trained on, by reason.
import { html } from "../vendor/htm-preact.js";
import { query, usePoll } from "../lib/api.js";
import { number, words } from "../lib/format.js";
import { Ago, Answer, Bar, EpisodeLink, Panel, Pill, VersionLink } from "../lib/parts.js";
import { link } from "../lib/route.js";
import { Pager, Table } from "../lib/table.js";

const WHAT = { group: "the whole group", sample: "one sample of its group", batch: "left out of a batch" };

const ITEMS = [
  { key: "task", name: "What", left: true, show: (row) => row.sample < 0 ? html`<a href=${link(["group", row.task])}>group ${row.task}</a>` : html`<${EpisodeLink} task=${row.task} sample=${row.sample} />` },
  { key: "reason", name: "Reason", left: true, up: true, show: (row) => html`<${Pill} tone="warn">${row.reason}<//>` },
  { key: "kind", name: "Kind", left: true, up: true, show: (row) => WHAT[row.kind] ?? row.kind },
  { key: "version", name: "Version", show: (row) => html`<${VersionLink} policy=${row.policy} version=${row.version} />` },
  { key: "policy", name: "Policy", left: true, up: true },
  { key: "at", name: "When", left: true, show: (row) => html`<${Ago} at=${row.at} />` },
];

function reasons(rows, params) {
  const all = rows.reduce((sum, row) => sum + row.count, 0) || 1;
  return [
    { key: "reason", name: "Reason", left: true, up: true, show: (row) => html`<a aria-current=${params.reason === row.reason ? "true" : undefined} href=${link(["discarded"], { policy: row.policy, reason: row.reason })}>${words(row.reason)}</a>` },
    { key: "kind", name: "Kind", left: true, up: true, show: (row) => WHAT[row.kind] ?? row.kind },
    { key: "policy", name: "Policy", left: true, up: true },
    { key: "count", name: "Count", show: (row) => html`<${Bar} share=${row.count / all} /> ${number(row.count)}` },
    { key: "first", name: "First", left: true, show: (row) => html`<${Ago} at=${row.first} />` },
    { key: "last", name: "Last", left: true, show: (row) => html`<${Ago} at=${row.last} />` },
  ];
}

export function DiscardedPage({ route }) {
  const { policy, reason, cursor } = route.params;
  const poll = usePoll(query("/api/discarded", { policy, reason, cursor, limit: 100 }), 5);
  return html`<${Answer} poll=${poll}>${(data) => html`
    <${Panel} title="Reasons" name="reasons" extra=${reason ? html`<a href="#/discarded">Show all reasons</a>` : null}>
      <${Table} label="Reasons" columns=${reasons(data.reasons, route.params)} rows=${data.reasons} initial="-count" empty="Everything was trained on." id=${(row) => [row.policy, row.reason, row.kind].join()} /><//>
    <${Panel} title=${reason ? `Discarded: ${words(reason)}` : "Discarded, newest first"} name="items">
      <${Table} label="Discarded" columns=${ITEMS} rows=${data.items} empty="Nothing was discarded." />
      <${Pager} list=${data} shown=${data.items.length} params=${route.params} /><//>`}<//>`;
}
