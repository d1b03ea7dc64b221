// Commands that the dashboard started: evaluations and replays.
import { html } from "../vendor/htm-preact.js";
import { usePoll } from "../lib/api.js";
import { clock, duration } from "../lib/format.js";
import { Action, Answer, Panel, Pill } from "../lib/parts.js";
import { harmless, Text } from "../lib/text.js";

export function JobsPage() {
  const poll = usePoll("/api/jobs", 2);
  return html`<${Answer} poll=${poll}>${(data) => data.items.length ? data.items.map((one) => html`<${Panel} key=${one.job} title=${harmless(one.command)}
    extra=${html`<${Pill}>${one.state}<//><span>began ${clock(one.began_at)}${one.ended_at ? `, took ${duration(one.ended_at - one.began_at)}` : ""}</span>
      ${one.state === "running" ? html`<${Action} name="Stop" action="stop" body=${{ job: one.job }} question=${`End ${harmless(one.command)}?`} onDone=${poll.reload} />` : null}`}>
    <div class="inside"><${Text} value=${one.output} label="Output" /></div><//>`)
    : html`<${Panel} title="Jobs"><p class="empty">No jobs. The actions on the page of a version start some.</p><//>`}<//>`;
}
