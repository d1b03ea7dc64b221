// Records that could not be read, and how to send them again.
import { html, useState } from "../vendor/htm-preact.js";
import { query, usePoll } from "../lib/api.js";
import { bytes, clock, number } from "../lib/format.js";
import { Action, Ago, Answer, Facts, Panel, Pill } from "../lib/parts.js";
import { link } from "../lib/route.js";
import { Pager, Table } from "../lib/table.js";
import { harmless, Text } from "../lib/text.js";

const MOST = 500;

const KINDS = [
  { key: "topic", name: "Topic", left: true, up: true, show: (row) => harmless(row.topic) },
  { key: "reason", name: "Reason", left: true, up: true, show: (row) => harmless(row.reason) },
  { key: "count", name: "Count" },
  { key: "redriven", name: "Sent again" },
  { key: "last_at", name: "Newest", left: true, show: (row) => html`<${Ago} at=${row.last_at} />` },
];

function items(chosen, toggle) {
  return [
    { key: "pick", name: "Choose", left: true, fixed: true, show: (row) => html`<input type="checkbox" aria-label=${`Choose dead letter ${row.number}`}
      checked=${chosen.has(row.number)} disabled=${row.redriven} onChange=${() => toggle(row.number)} />` },
    { key: "number", name: "Number", left: true, show: (row) => html`<a href=${link(["dead-letter", row.number])}>${row.number}</a>` },
    { key: "topic", name: "Topic", left: true, up: true, show: (row) => harmless(row.topic) },
    { key: "reason", name: "Reason", left: true, up: true, show: (row) => harmless(row.reason) },
    { key: "reader", name: "Reader", left: true, up: true, show: (row) => harmless(row.reader) },
    { key: "bytes", name: "Size", show: (row) => bytes(row.bytes) },
    { key: "redriven", name: "State", left: true, show: (row) => html`<${Pill}>${row.redriven ? "sent again" : "waiting"}<//>` },
    { key: "at", name: "When", left: true, show: (row) => html`<${Ago} at=${row.at} />` },
  ];
}

export function DeadLettersPage({ route }) {
  const poll = usePoll(query("/api/dead-letters", { cursor: route.params.cursor, limit: 100 }), 5);
  const [chosen, choose] = useState(new Set());
  function toggle(number_) {
    const next = new Set(chosen);
    if (!next.delete(number_) && next.size < MOST) next.add(number_);
    choose(next);
  }
  return html`<${Answer} poll=${poll}>${(data) => html`
    <${Panel} title="Kinds" name="kinds"><${Table} label="Kinds" columns=${KINDS} rows=${data.kinds} initial="-count" empty="Every record could be read." id=${(row) => row.topic + row.reason} /><//>
    <${Panel} title="Dead letters" name="letters" extra=${html`<span>${number(chosen.size)} chosen</span>
        ${chosen.size ? html`<${Action} name="Send again" action="redrive" body=${{ numbers: [...chosen] }} question=${`Send ${chosen.size} records to their topics again?`} onDone=${() => { choose(new Set()); poll.reload(); }} />` : html`<button type="button" disabled>Send again</button>`}`}>
      <${Table} label="Dead letters" columns=${items(chosen, toggle)} rows=${data.items} initial="-number" empty="No dead letters." id=${(row) => row.number} />
      <${Pager} list=${data} shown=${data.items.length} params=${route.params} /><//>`}<//>`;
}

export function DeadLetterPage({ route }) {
  const poll = usePoll(`/api/dead-letters/${encodeURIComponent(route.parts[0])}`, 0);
  return html`<${Answer} poll=${poll}>${(data) => html`
    <${Panel} title=${`Dead letter ${data.number}`} extra=${data.refused ? html`<span>${harmless(data.refused)}</span>` : html`<${Action} name="Send again" action="redrive" body=${{ numbers: [data.number] }} question="Send this record to its topic again?" onDone=${poll.reload} />`}>
      <${Facts} items=${[["Record", html`<a href=${link(["record"], { at: data.location })}>${harmless(data.location)}</a>`], ["Time", clock(data.at)], ["Reader", harmless(data.reader)], ["Size", bytes(data.bytes)], ["Key", html`<code>${data.key}</code>`],
        ...Object.entries(data.headers).map(([name, value]) => [harmless(name), harmless(value)])]} />
      <div class="inside"><h3>Reason</h3><p>${harmless(data.reason)}</p></div><//>
    <${Panel} title="Value">
      <div class="inside">${data.value_text === null ? html`<p class="muted">It is not text. Its first bytes in hexadecimal:</p><${Text} value=${data.value_hex} label="Value in hexadecimal" />` : html`<${Text} value=${data.value_text} label="Value" />`}</div><//>`}<//>`;
}
