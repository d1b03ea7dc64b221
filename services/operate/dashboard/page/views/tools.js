// Which tool calls fail, most failures first.
import { html } from "../vendor/htm-preact.js";
import { query, usePoll } from "../lib/api.js";
import { duration, number, percent } from "../lib/format.js";
import { Answer, Bar, EpisodeLink, Panel } from "../lib/parts.js";
import { link } from "../lib/route.js";
import { Pager, Table } from "../lib/table.js";
import { harmless } from "../lib/text.js";

const COLUMNS = [
  { key: "tool", name: "Tool", left: true, up: true, show: (row) => html`<a href=${link(["episodes"], { tool: row.tool })}>${harmless(row.tool)}</a>` },
  { key: "failed", name: "Failed", show: (row) => row.failed ? html`<a href=${link(["episodes"], { tool: row.tool, tool_failed: 1 })}>${number(row.failed)}</a>` : "0" },
  { key: "share", name: "Share", show: (row) => html`<${Bar} share=${row.share} tone="bad" /> ${percent(row.share)}` },
  { key: "calls", name: "Calls" },
  { key: "seconds_mean", name: "Mean time", show: (row) => duration(row.seconds_mean) },
  { key: "example", name: "Example of a failure", left: true, fixed: true, show: (row) => row.example ? html`<${EpisodeLink} ...${row.example} params=${{ tab: "calls" }} />` : "–" },
];

export function ToolsPage({ route }) {
  const poll = usePoll(query("/api/tools", { cursor: route.params.cursor, limit: 100 }), 5);
  return html`<${Answer} poll=${poll}>${(data) => html`<${Panel} title="Tools" name="tools">
    <${Table} label="Tools" columns=${COLUMNS} rows=${data.items} id=${(row) => row.tool} initial="-failed" empty="No episode has called a tool." tone=${(row) => (row.share > 0.2 ? "bad" : "")} />
    <${Pager} list=${data} shown=${data.items.length} params=${route.params} /><//>
    <p class="muted inside">A call has failed if the environment reported a failure, or if its answer begins like an error.</p>`}<//>`;
}
