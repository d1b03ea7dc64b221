// What the policy read and wrote along one branch, and what the environment did between.
import { html, useEffect, useRef } from "../../vendor/htm-preact.js";
import { absent, duration, number, range, reward, signed, words } from "../../lib/format.js";
import { Failure, Pill, VersionLink } from "../../lib/parts.js";
import { harmless, Text } from "../../lib/text.js";
import { Artifact } from "../group.js";

// The exchanges that come after the prompt of each turn and before the next prompt.
export function after(exchanges) {
  const found = new Map();
  let turn = -1;
  for (const one of exchanges) {
    if (one.turn !== null && one.turn !== undefined) turn = one.turn;
    else if (one.kind !== "generate") found.set(turn, [...(found.get(turn) ?? []), one]);
  }
  return found;
}

const filled = (text) => text && (typeof text === "string" ? text : text.text) !== "";

export function ToolCall({ call }) {
  return html`<div class="toolcall"><b>${harmless(call.name)}</b><code>${harmless(call.arguments).slice(0, 2000)}</code></div>`;
}

function Step({ one }) {
  return html`<div class=${`step ${one.failed ? "bad" : ""}`}>
    <span><b>${one.kind}</b> ${harmless(one.what)}</span>
    <span class="muted">${harmless(one.worker ?? "")} · waited ${duration(one.queue_s)} · ran ${duration(one.run_s)}</span>
    ${absent(one.reward) ? null : html`<span>reward ${reward(one.reward)}</span>`}
    ${one.terminated ? html`<${Pill} tone="good">ended by the environment<//>` : null}
    ${one.truncated ? html`<${Pill} tone="warn">truncated<//>` : null}
    ${one.failure ? html`<${Failure} failure=${one.failure} />` : one.failed ? html`<${Pill} tone="bad">error<//>` : null}
    ${one.artifacts?.length ? html`<div class="artifacts">${one.artifacts.map((each) => html`<${Artifact} key=${each.sha256 + each.name} artifact=${each} />`)}</div>` : null}
  </div>`;
}

function Turn({ turn, steps, policy, marked }) {
  const advantages = Object.values(turn.advantages ?? {}).filter((one) => one !== null);
  return html`<article id=${`turn-${turn.index}`} class=${marked ? "marked" : ""} aria-label=${`Turn ${turn.index}`}>
    ${filled(turn.context) ? html`<div class="block context"><header><b>${turn.parent < 0 ? "Prompt" : "Context"}</b><span>${number(turn.context_tokens)} tokens in all</span></header>
      <${Text} value=${turn.context} label=${`Context of turn ${turn.index}`} /></div>` : null}
    <div class=${`block ${turn.demonstrated ? "demonstrated" : "sampled"}`}>
      <header><b>Turn ${turn.index}</b><span>${harmless(turn.policy)}${turn.role && turn.role !== "policy" ? ` as ${harmless(turn.role)}` : ""}</span>
        <span>version <${VersionLink} policy=${turn.policy || policy} version=${turn.versions.at(-1)}>${range(turn.versions[0], turn.versions.at(-1))}<//></span>
        <span>${number(turn.tokens)} tokens</span><span>mean logprob ${number(turn.logprob_mean)}</span>
        ${advantages.length ? html`<span>advantage ${advantages.map(signed).join(" ")}</span>` : null}
        ${absent(turn.reward) ? null : html`<span>reward ${reward(turn.reward)}</span>`}
        <${Pill} tone=${turn.finish === "length" ? "warn" : ""}>${turn.finish || "open"}<//>
        ${turn.trainable ? null : html`<${Pill} tone="warn">masked<//>`}${turn.demonstrated ? html`<${Pill} tone="live">demonstrated<//>` : null}</header>
      <${Text} value=${turn.text} label=${`Text of turn ${turn.index}`} />
      ${turn.tool_calls.map((call, index) => html`<${ToolCall} key=${index} call=${call} />`)}
    </div>
    ${steps.map((one) => html`<${Step} key=${one.call + one.kind} one=${one} />`)}
  </article>`;
}

export function Transcript({ data, chosen, turn }) {
  const place = useRef(null);
  useEffect(() => {
    if (turn !== undefined) place.current?.querySelector(`#turn-${CSS.escape(turn)}`)?.scrollIntoView({ block: "start" });
  }, [turn]);
  const known = new Map(data.turns.map((one) => [one.index, one]));
  const steps = after(data.exchanges);
  if (!chosen.length) return html`<p class="empty">${words(data.state)}: nothing was sampled yet.</p>`;
  return html`<div class="transcript" ref=${place}>
    ${(steps.get(-1) ?? []).map((one) => html`<${Step} key=${one.call + one.kind} one=${one} />`)}
    ${chosen.map((index) => html`<${Turn} key=${index} turn=${known.get(index)} steps=${steps.get(index) ?? []} policy=${data.policies[0]?.policy} marked=${String(index) === turn} />`)}
  </div>`;
}
