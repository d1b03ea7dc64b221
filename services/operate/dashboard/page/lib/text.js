// Text of models, tools and users. It becomes text nodes, never markup. What a terminal or a
// browser would act on (escapes, control characters, direction marks) is shown as a visible mark.
import { html, useMemo, useState } from "../vendor/htm-preact.js";
import { get } from "./api.js";
import { compact } from "./format.js";

const CONTROL =
  /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u206f\ufeff\ud800-\udfff\u{e0000}-\u{e007f}]+/gu;
const NAMES = ("NUL SOH STX ETX EOT ENQ ACK BEL BS HT LF VT FF CR SO SI DLE DC1 DC2 DC3 DC4 NAK SYN ETB CAN EM SUB "
  + "ESC FS GS RS US").split(" ");
const PIECE = 20_000;
const MOST_MARKED = 100_000;

export function mark(character) {
  const code = character.codePointAt(0);
  const name = NAMES[code] ?? (code === 0x7f ? "DEL" : `U+${code.toString(16).toUpperCase().padStart(4, "0")}`);
  return `⟨${name}⟩`;
}

const marks = (run) => Array.from(run, mark).join("");

// The text without characters that something would act on.
export const harmless = (text) => String(text ?? "").replaceAll("\r\n", "\n").replace(CONTROL, marks);

// Strings and marks, in order.
export function split(text) {
  const found = [];
  let end = 0;
  text = text.replaceAll("\r\n", "\n");
  for (const hit of text.matchAll(CONTROL)) {
    if (hit.index > end) found.push(text.slice(end, hit.index));
    found.push(html`<b class="mark" title="control characters">${marks(hit[0])}</b>`);
    end = hit.index + hit[0].length;
  }
  if (end < text.length) found.push(text.slice(end));
  return found;
}

// Pieces of about 20,000 characters, cut at ends of lines if they have some.
export function pieces(text) {
  const found = [];
  let start = 0;
  while (start < text.length) {
    let end = Math.min(start + PIECE, text.length);
    const line = text.lastIndexOf("\n", end - 1);
    if (end < text.length && line > start + PIECE / 2) end = line + 1;
    else if (end < text.length && /[\ud800-\udbff]/.test(text[end - 1])) end -= 1;
    found.push(text.slice(start, end));
    start = end;
  }
  return found;
}

// The pieces as elements. Marks of long texts have no element of their own, so that these stay few.
function drawn(text) {
  const parts = pieces(text);
  return parts.map((part, index) => {
    const shown = index < parts.length - 1 && part.endsWith("\n") ? part.slice(0, -1) : part;
    return html`<div class=${parts.length > 1 ? "piece" : "whole"} key=${index}>${text.length > MOST_MARKED ? harmless(shown) : split(shown)}</div>`;
  });
}

// `value` is a string, or {text, length, more} of the server.
export function Text({ value, className = "", label = "Text" }) {
  const [whole, setWhole] = useState({ of: null, text: null, state: "" });
  const given = value?.text === undefined ? { text: value ?? "", length: value?.length, more: null } : value;
  const known = whole.of === given.more && given.more !== null;
  const text = known && whole.text !== null ? whole.text : given.text;
  // The same elements as before are skipped when the page is drawn again.
  const inside = useMemo(() => drawn(text), [text]);
  if (value === null || value === undefined) return html`<p class="muted">Not recorded.</p>`;
  const cut = given.more !== null && !(known && whole.text !== null);
  async function showAll() {
    setWhole({ of: given.more, text: null, state: "Loading …" });
    try {
      const all = await get(given.more);
      setWhole({ of: given.more, text: all.text, state: "" });
    } catch (error) {
      setWhole({ of: given.more, text: null, state: error.message });
    }
  }
  return html`<div class="text ${className}" tabindex="0" role="group" aria-label=${label}>
      ${text === "" ? html`<span class="muted">(empty)</span>` : null}
      ${inside}
    </div>
    ${cut
      ? html`<div class="cut">
          <span>${compact(text.length)} of ${compact(given.length)} characters</span>
          <button type="button" onClick=${showAll}>Show all</button>
          <span role="status">${known ? whole.state : ""}</span>
        </div>`
      : null}`;
}
