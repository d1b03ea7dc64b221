// The calls of an episode: what was asked, what came back, and what failed.
import { html, useState } from "../../vendor/htm-preact.js";
import { absent, clock, duration, number, range, reward } from "../../lib/format.js";
import { Facts, Failure, Panel, Pill } from "../../lib/parts.js";
import { link } from "../../lib/route.js";
import { harmless, Text } from "../../lib/text.js";
import { ToolCall } from "./transcript.js";

const record = (name, at) => [name, at ? html`<a href=${link(["record"], { at })}>${at}</a>` : null];

function Body({ one, turn }) {
  return html`<div class="inside">
    ${turn?.tool_calls.map((call, index) => html`<${ToolCall} key=${index} call=${call} />`)}
    <${Facts} items=${[["Asked", clock(one.requested_at)], ["Answered", clock(one.answered_at)], ["In a queue", duration(one.queue_s)], ["Ran", duration(one.run_s)],
      ["Worker", harmless(one.worker)], ["Versions", one.versions?.length ? range(one.versions[0], one.versions.at(-1)) : null],
      ["Prompt tokens", one.prompt_tokens ? number(one.prompt_tokens) : null], ["of them cached", one.prompt_tokens ? number(one.cached_tokens) : null],
      record("Request", one.request_location), record("Answer", one.answer_location)]} />
    <h3>Request</h3><${Text} value=${one.request} label="Request" /><h3>Answer</h3><${Text} value=${one.answer} label="Answer" /></div>`;
}

function Call({ one, turn }) {
  const [open, set] = useState(Boolean(one.failed));
  return html`<details class=${one.failed ? "bad" : ""} open=${open} onToggle=${(event) => set(event.currentTarget.open)}>
    <summary><b>${one.kind}</b> <span>${harmless(one.what)}</span>
      ${turn?.tool_calls.map((call, index) => html`<span class="tool" key=${index}>${harmless(call.name)}</span>`)}
      <span class="muted">call ${harmless(one.call)}${turn ? `, turn ${turn.index}` : ""}</span>
      ${absent(one.reward) ? null : html`<span>reward ${reward(one.reward)}</span>`}
      ${one.finish ? html`<${Pill}>${one.finish}<//>` : null}
      ${absent(one.answered_at) ? html`<${Pill} tone="warn">no answer yet<//>` : null}
      ${one.failure ? html`<${Failure} failure=${one.failure} />` : one.failed ? html`<${Pill} tone="bad">error<//>` : null}
      <span class="took">${absent(one.answered_at) || absent(one.requested_at) ? "" : duration(one.answered_at - one.requested_at)}</span></summary>
    ${open ? html`<${Body} one=${one} turn=${turn} />` : null}
  </details>`;
}

export function Calls({ data }) {
  const [only, set] = useState(false);
  const turns = new Map(data.turns.map((turn) => [turn.index, turn]));
  const failed = data.exchanges.filter((one) => one.failed);
  const shown = only ? failed : data.exchanges;
  return html`<${Panel} title=${`${number(data.exchanges.length)} calls, ${number(failed.length)} failed`}
    extra=${html`<label class="check"><input type="checkbox" checked=${only} onChange=${(event) => set(event.currentTarget.checked)} /> only failed</label>`}>
    <div class="calls">${shown.map((one) => html`<${Call} key=${`${one.call} ${one.kind} ${one.index}`} one=${one} turn=${turns.get(one.turn)} />`)}
      ${shown.length ? null : html`<p class="empty">${only ? "No call failed." : "The calls are no longer in the log. Turns are kept for longer."}</p>`}</div><//>`;
}
