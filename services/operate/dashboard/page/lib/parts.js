// The small parts that all pages are made of.
import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { post } from "./api.js";
import { clock, duration, words } from "./format.js";
import { link } from "./route.js";
import { harmless } from "./text.js";

export function Panel({ title, extra, className = "", children, name }) {
  return html`<section class="panel ${className}" data-name=${name} aria-label=${title}>
    ${title ? html`<header><h2>${title}</h2><div class="extra">${extra}</div></header>` : null}
    ${children}
  </section>`;
}

export function Tile({ name, value, note, href, tone = "" }) {
  const inside = html`<span class="name">${name}</span><span class="value ${tone}">${value}</span>
    <span class="note">${note ?? " "}</span>`;
  return href ? html`<a class="tile" href=${href}>${inside}</a>` : html`<div class="tile">${inside}</div>`;
}

// What a page shows before its first answer, or instead of it.
export function Answer({ poll, rows = 6, className = "", children }) {
  if (poll.data !== null) return children(poll.data);
  if (poll.error === null) {
    // The key keeps its element from becoming a part of the page, which would be seen as a move.
    return html`<div key="skeleton" class="skeleton ${className}" role="status" aria-label="Loading">
      ${Array.from({ length: rows }, (_, index) => html`<i key=${index}></i>`)}
    </div>`;
  }
  const { status, message } = poll.error;
  const title =
    status === undefined ? "The server does not answer" : status === 401 ? "This browser may not read the run"
    : status === 404 ? "There is no such thing" : status === 503 ? "Not there yet" : "The server refused";
  const help = status === 401
    ? "Open the URL with the token which `headrace dashboard` printed." : status === undefined
    ? "Check that `headrace dashboard` still runs. This page goes on by itself." : message;
  return html`<div class="failed" role="alert"><h2>${title}</h2><p>${harmless(help)}</p></div>`;
}

export const Empty = ({ children }) => html`<p class="empty">${children}</p>`;

const TONES = {
  finished: "good", ended: "good", ready: "good", scored: "good", trained: "good", done: "good", accepted: "good",
  failed: "bad", error: "bad", lost: "bad", dead: "bad", aborted: "bad", dropped: "warn", running: "live",
  started: "live", waiting: "warn", skipped: "warn", suspected: "warn", leaving: "warn",
};

export const Pill = ({ children, tone }) =>
  html`<span class="pill ${tone ?? TONES[children] ?? ""}">${words(harmless([children].flat().join("")))}</span>`;

export function useNow(everyMs = 1000) {
  const [now, set] = useState(Date.now() / 1000);
  useEffect(() => {
    const timer = setInterval(() => set(Date.now() / 1000), everyMs);
    return () => clearInterval(timer);
  }, [everyMs]);
  return now;
}

// For how long, counted by the second. `ahead` is the server's clock minus this one, in seconds.
export function Since({ at, ahead = 0 }) {
  const now = useNow();
  return html`<time title=${clock(at)}>${duration(Math.max(0, Math.floor(now + ahead - at)))}</time>`;
}

export function Ago({ at }) {
  const now = useNow(5000);
  if (at === null || at === undefined) return "–";
  return html`<time title=${clock(at)}>${duration(Math.max(0, Math.floor(now - at)))} ago</time>`;
}

export function Copy({ text, name = "Copy" }) {
  const [done, set] = useState("");
  async function copy() {
    try {
      await navigator.clipboard.writeText(text);
      set("Copied");
    } catch {
      set("Select it and copy");
    }
    setTimeout(() => set(""), 1500);
  }
  return html`<span class="copy"><code tabindex="0">${harmless(text)}</code>
    <button type="button" aria-label=${`${name}: ${text}`} onClick=${copy}>${done || name}</button>
    <span class="unseen" role="status">${done}</span></span>`;
}

export const EpisodeLink = ({ task, sample, children, params }) =>
  html`<a href=${link(["episode", task, sample], params)}>${children ?? `${task}/${sample}`}</a>`;

export const VersionLink = ({ policy = "default", version, children }) =>
  version === null || version === undefined || version < 0
    ? "–"
    : html`<a href=${link(["version", policy, version])}>${children ?? version}</a>`;

export function Failure({ failure }) {
  if (!failure) return "–";
  return html`<span class="failure"><b>${words(failure.origin)}</b> ${words(harmless(failure.code))}
    ${failure.message ? html`<span class="muted"> ${harmless(failure.message).slice(0, 400)}</span>` : null}</span>`;
}

// Names with their values, as a definition list.
export const Facts = ({ items }) =>
  html`<dl class="facts">
    ${items.filter(([, value]) => value !== null && value !== undefined).map(
      ([name, value]) => html`<div key=${name}><dt>${name}</dt><dd>${value}</dd></div>`,
    )}
  </dl>`;

// A bar of a share between 0 and 1.
export function Bar({ share, tone = "" }) {
  const width = `${Math.max(0, Math.min(1, share || 0)) * 100}%`;
  return html`<span class="bar ${tone}"><i style=${{ width }}></i></span>`;
}

export function Histogram({ counts, edges, name }) {
  const most = Math.max(1, ...counts);
  const text = counts.map((count, i) => `${edges[i]} to ${edges[i + 1]}: ${count}`).join(", ");
  return html`<div class="histogram" role="img" aria-label=${`${name}. ${text}`}>
    ${counts.map((count, i) => html`<span key=${i} title=${`${edges[i]} to ${edges[i + 1]}: ${count}`}>
      <i style=${{ height: `${(count / most) * 100}%` }}></i></span>`)}
    <div class="axis"><span>${edges[0]}</span><span>${edges[edges.length - 1]}</span></div>
  </div>`;
}

const newRequest = () => Array.from(crypto.getRandomValues(new Uint8Array(8)), (one) => one.toString(16).padStart(2, "0")).join("");

// A button that asks once more before it acts, and says what came of it.
export function Action({ name, action, body, question, onDone, once = false }) {
  const [said, say] = useState("");
  const dialog = useRef(null);
  // With `once`, what is asked for keeps its id until it has succeeded: a repetition does nothing more.
  const request = useRef(newRequest());
  async function act() {
    dialog.current.close();
    say("Asked …");
    try {
      const answer = await post(action, once ? { ...body, request: request.current } : body);
      request.current = newRequest();
      const refused = (answer.results ?? []).filter((each) => each.refused);
      say(refused.length ? refused.map((each) => `${each.number}: ${each.refused}`).join("; ") : answer.message ?? "Done.");
      onDone?.(answer);
    } catch (error) {
      say(error.message);
    }
  }
  return html`<span class="action">
    <button type="button" onClick=${() => dialog.current.showModal()}>${name}</button>
    <dialog ref=${dialog} aria-label=${name}>
      <p>${question}</p>
      <div class="buttons"><button type="button" onClick=${() => dialog.current.close()}>No</button>
        <button type="button" class="strong" onClick=${act}>${name}</button></div>
    </dialog>
    <span class="said" role="status">${harmless(said)}</span>
  </span>`;
}

// Tabs whose choice is in the link. Left and right move between them.
export function Tabs({ names, chosen, onChoose, label }) {
  const list = useRef(null);
  function move(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    const keys = Object.keys(names);
    const next = keys[(keys.indexOf(chosen) + step + keys.length) % keys.length];
    onChoose(next);
    list.current.querySelector(`[data-tab="${next}"]`).focus();
  }
  return html`<div class="tabs" role="tablist" aria-label=${label} ref=${list} onKeyDown=${move}>
    ${Object.entries(names).map(([key, name]) => html`<button type="button" role="tab" key=${key} data-tab=${key}
      aria-selected=${key === chosen ? "true" : "false"} tabindex=${key === chosen ? 0 : -1}
      onClick=${() => onChoose(key)}>${name}</button>`)}
  </div>`;
}

// The policies of a run as links, if there are several.
export function PolicyChoice({ policies, chosen, href }) {
  if (policies.length < 2) return null;
  return html`<nav class="choice" aria-label="Policy">${policies.map((name) => html`<a key=${name}
    href=${href(name)} aria-current=${name === chosen ? "true" : undefined}>${harmless(name)}</a>`)}</nav>`;
}
