// Topics, their records, and one record as `headrace show` prints it.
import { html } from "../vendor/htm-preact.js";
import { query, usePoll } from "../lib/api.js";
import { clock, number, words } from "../lib/format.js";
import { Answer, Facts, Panel } from "../lib/parts.js";
import { change, link } from "../lib/route.js";
import { Table } from "../lib/table.js";
import { harmless, Text } from "../lib/text.js";

const TOPICS = [
  { key: "topic", name: "Topic", left: true, up: true, show: (row) => html`<a href=${link(["topic", row.name], { policy: row.policy })}>${harmless(row.topic)}</a>` },
  { key: "event", name: "Event", left: true, up: true },
  { key: "policy", name: "Policy", left: true, up: true },
  { key: "records", name: "Records" },
  { key: "partitions", name: "Partitions" },
  { key: "first", name: "First offset" },
  { key: "writer", name: "Sole writer", left: true, up: true },
  { key: "kept", name: "Kept", left: true, up: true, show: (row) => words(String(row.kept)) },
];

export function TopicsPage() {
  const poll = usePoll("/api/topics", 5);
  return html`<${Answer} poll=${poll}>${(data) => html`<${Panel} title="Topics" name="topics">
    <${Table} label="Topics" columns=${TOPICS} rows=${data.items} id=${(row) => row.topic} initial="topic" empty="This run has no topics." /><//>`}<//>`;
}

const RECORDS = [
  { key: "location", name: "Record", left: true, fixed: true, show: (row) => html`<a href=${link(["record"], { at: row.location })}>${row.partition}@${row.offset}</a>` },
  { key: "at", name: "Time", left: true, fixed: true, show: (row) => clock(row.at) },
  { key: "id", name: "Id", left: true, fixed: true, show: (row) => harmless(row.id) },
  { key: "event", name: "Event", left: true, fixed: true, show: (row) => html`<code>${harmless(row.preview.text).slice(0, 300)}</code>` },
];

export function TopicPage({ route }) {
  const { policy, partition, before } = route.params;
  const poll = usePoll(query("/api/records", { topic: route.parts[0], policy, partition, before, limit: 50 }), before ? 0 : 5);
  return html`<${Answer} poll=${poll}>${(data) => html`<${Panel} title=${`Records of ${harmless(route.parts[0])}, newest first`} name="records">
    <${Table} label="Records" columns=${RECORDS} rows=${data.items} id=${(row) => row.location} empty="This topic has no records." />
    <nav class="pager" aria-label="Pages">
      ${before ? html`<button type="button" onClick=${() => change({ before: null })}>Newest</button>` : null}
      ${data.next === null || data.next === undefined ? null : html`<button type="button" onClick=${() => change({ before: data.next })}>Older</button>`}</nav><//>`}<//>`;
}

export function RecordPage({ route }) {
  const poll = usePoll(query("/api/record", { at: route.params.at }), 0);
  return html`<${Answer} poll=${poll}>${(data) => html`<${Panel} title=${`${data.type} ${harmless(data.id)}`} name="record">
    <${Facts} items=${[["Topic", harmless(data.topic)], ["Partition", number(data.partition)], ["Offset", number(data.offset)], ["Time", clock(data.at)]]} />
    <div class="inside"><${Text} value=${JSON.stringify(data.event, null, 2)} label="Event" /></div><//>`}<//>`;
}
