// Every hop of an episode: how long it waited in a queue, ran, and was on its way.
import { html } from "../../vendor/htm-preact.js";
import { clock, duration } from "../../lib/format.js";
import { Panel } from "../../lib/parts.js";
import { harmless } from "../../lib/text.js";

const SHOWN = 300;
const TICKS = 5;

function Hop({ hop, from, span }) {
  const percent = (seconds) => `${(Math.max(0, seconds) / span) * 100}%`;
  const end = hop.end ?? hop.start;
  const run = hop.run_s ?? 0;
  const queue = hop.queue_s ?? 0;
  const text = `waited ${duration(hop.queue_s)}, ran ${duration(hop.run_s)}, log and routing ${duration(hop.other_s)}`;
  return html`<li title=${`${clock(hop.start)}: ${text}`}>
    <span class="name">${harmless(hop.name)}</span>
    <span class="track">
      <i class="other" style=${{ left: percent(hop.start - from), width: percent(end - hop.start) }}></i>
      <i class="queue" style=${{ left: percent(end - run - queue - from), width: percent(queue) }}></i>
      <i class="run" style=${{ left: percent(end - run - from), width: percent(run) }}></i>
    </span>
    <span class="took">${hop.end === null || hop.end === undefined ? "not answered" : duration(end - hop.start)}</span><span class="unseen">${text}</span></li>`;
}

export function Timeline({ data }) {
  const hops = data.timeline.slice(0, SHOWN);
  if (!hops.length) return html`<p class="empty">The hops of this episode are no longer in the log. Turns are kept for longer.</p>`;
  const from = Math.min(...hops.map((hop) => hop.start));
  const span = Math.max(1e-3, ...hops.map((hop) => (hop.end ?? hop.start) - from));
  const total = (key) => duration(data.timeline.reduce((sum, hop) => sum + (hop[key] ?? 0), 0));
  return html`<${Panel} title=${`${data.timeline.length} hops in ${duration(span)}`} extra=${html`<span class="keys">
      <span><i class="queue"></i>in a queue ${total("queue_s")}</span><span><i class="run"></i>running ${total("run_s")}</span><span><i class="other"></i>log and routing ${total("other_s")}</span></span>`}>
    <div class="scroll" tabindex="0" role="group" aria-label="Timeline"><ol class="timeline">
      <li class="ticks" aria-hidden="true"><span class="name"></span><span class="track">${Array.from({ length: TICKS }, (_, i) => html`<b key=${i} style=${{ left: `${(i / TICKS) * 100}%` }}>${duration((span * i) / TICKS)}</b>`)}</span><span class="took"></span></li>
      ${hops.map((hop, index) => html`<${Hop} key=${index} hop=${hop} from=${from} span=${span} />`)}</ol></div>
    ${data.timeline.length > SHOWN ? html`<p class="muted inside">The first ${SHOWN} are drawn. <b>Calls</b> lists all.</p>` : null}<//>`;
}
