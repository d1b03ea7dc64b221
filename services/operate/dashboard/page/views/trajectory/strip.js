// The tokens of one branch as a strip. Only the visible rows are in the document, so that tens of
// thousands of tokens scroll smoothly. Widths are counted in cells of a monospaced font.
import { html, useEffect, useMemo, useRef, useState } from "../../vendor/htm-preact.js";
import { get, nextDelay, query } from "../../lib/api.js";
import { number } from "../../lib/format.js";
import { Facts, Panel } from "../../lib/parts.js";
import { change } from "../../lib/route.js";
import { harmless } from "../../lib/text.js";
import { modes, Overview } from "./colours.js";

const [PAGE, ROW_PX, MARGIN_ROWS] = [8000, 22, 12];
const WIDE = /[\u1100-\u115f\u2e80-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60\uffe0-\uffe6\u{1f300}-\u{1faff}\u{20000}-\u{3fffd}]/u;
const COLUMNS = ["turn", "id", "text", "origin", "mask", "logprob", "trainer", "teacher", "version", "policy"];

// A token as it is drawn: marks for line ends and tabs, never empty.
export function drawn(text) {
  if (text === "") return "·";
  return harmless(text.replaceAll("\r\n", "\n")).replaceAll("\n", "↵").replaceAll("\t", "⇥");
}

export function cells(text) {
  let count = 0;
  for (const character of text) count += WIDE.test(character) ? 2 : 1;
  return count;
}

// The first token of each row, if a row has `width` cells. A line end ends its row.
export function rows(texts, width) {
  const starts = [0];
  let used = 0;
  texts.forEach((text, index) => {
    const size = Math.min(width, cells(drawn(text)));
    if (used && used + size > width) {
      starts.push(index);
      used = 0;
    }
    used += size;
    if (text.endsWith("\n") && index + 1 < texts.length) {
      starts.push(index + 1);
      used = 0;
    }
  });
  return starts;
}

// The row of a token, by bisection.
export function rowOf(starts, token) {
  let [low, high] = [0, starts.length - 1];
  while (low < high) {
    const middle = Math.ceil((low + high) / 2);
    if (starts[middle] <= token) low = middle;
    else high = middle - 1;
  }
  return low;
}

// All tokens of a branch, page by page.
function useTokens(task, sample, attempt, branch) {
  const [state, set] = useState({ tokens: null, total: 0, error: null });
  useEffect(() => {
    let ended = false;
    (async () => {
      let found = null;
      let failures = 0;
      for (let from = 0; from !== null && !ended; ) {
        try {
          const page = await get(query(`/api/episodes/${task}/${sample}/tokens`, { attempt, branch, from, limit: PAGE }));
          found = found === null ? page : { ...found, ...Object.fromEntries(COLUMNS.map((name) => [name, found[name].concat(page[name])])) };
          from = page.next;
          failures = 0;
          if (!ended) set({ tokens: found, total: page.total, error: null });
        } catch (error) {
          if (ended) return;
          set((old) => ({ ...old, error }));
          if (error.status < 500) return;
          failures += 1;
          await new Promise((done) => setTimeout(done, nextDelay(0, failures)));
        }
      }
    })();
    return () => {
      ended = true;
    };
  }, [task, sample, attempt, branch]);
  return state;
}

function useWidth(place) {
  const [width, set] = useState(0);
  useEffect(() => {
    const measure = () => {
      const cell = place.current.querySelector(".cell").getBoundingClientRect().width / 20;
      if (cell) set(Math.max(10, Math.floor((place.current.clientWidth - 24) / cell)));
    };
    const observer = new ResizeObserver(measure);
    observer.observe(place.current);
    measure();
    return () => observer.disconnect();
  }, []);
  return width;
}

function Row({ tokens, from, to, top, mode, chosen, onChoose }) {
  const found = [];
  for (let i = from; i < to; i += 1) {
    const { name, back } = mode.paint(tokens, i);
    found.push(html`<span key=${i} data-token=${i} class=${`${name} ${i === chosen ? "chosen" : ""}`}
      style=${back ? { backgroundColor: back } : undefined}>${drawn(tokens.text[i])}</span>`);
  }
  return html`<div class="row" style=${{ top: `${top}px` }} onClick=${(event) => event.target.dataset.token && onChoose(Number(event.target.dataset.token))}>${found}</div>`;
}

function Chosen({ tokens, at }) {
  if (at === null) return html`<p class="muted inside">Click a token, or move with the arrow keys, to see its numbers.</p>`;
  const difference = tokens.trainer[at] === null || tokens.logprob[at] === null ? null : tokens.trainer[at] - tokens.logprob[at];
  return html`<div role="status"><${Facts} items=${[
    ["Token", `${number(at)}: ${JSON.stringify(drawn(tokens.text[at]))}`], ["Id", String(tokens.id[at])],
    ["Origin", ["context", "sampled", "demonstrated"][tokens.origin[at]]], ["Trained on", tokens.mask[at] ? "yes" : "no"],
    ["Engine logprob", number(tokens.logprob[at])], ["Trainer logprob", number(tokens.trainer[at])],
    ["Trainer minus engine", number(difference)], ["Teacher logprob", number(tokens.teacher[at])],
    ["Turn", String(tokens.turn[at])], ["Version", tokens.version[at] < 0 ? "–" : String(tokens.version[at])], ["Policy", harmless(tokens.policies[tokens.policy[at]])]]} /></div>`;
}

export function Strip({ data, branch, attempt, params }) {
  const { tokens, total, error } = useTokens(data.task, data.sample, attempt, branch);
  const [place, box] = [useRef(null), useRef(null)];
  const width = useWidth(place);
  const [scroll, setScroll] = useState({ top: 0, height: 440 });
  const all = modes(tokens);
  const mode = all[params.colour] ?? all.origin;
  const starts = useMemo(() => (tokens && width ? rows(tokens.text, width) : []), [tokens, width]);
  const at = params.at !== undefined && tokens && Number(params.at) < tokens.text.length ? Number(params.at) : null;
  const choose = (token) => change({ at: token }, true);
  const show = (token) => {
    const top = rowOf(starts, token) * ROW_PX;
    const { scrollTop, clientHeight } = box.current;
    if (top < scrollTop || top + ROW_PX > scrollTop + clientHeight) box.current.scrollTop = Math.max(0, top - clientHeight / 2);
  };
  useEffect(() => {
    if (at !== null && starts.length) show(at);
  }, [at, starts]);
  function press(event) {
    const now = at ?? -1;
    const row = starts[rowOf(starts, Math.max(0, now))];
    const line = (step) => Math.max(0, (starts[rowOf(starts, Math.max(0, now)) + step] ?? now - (now - row)) + Math.max(0, now) - row);
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, ArrowUp: line(-1), ArrowDown: line(1), Home: 0, End: (tokens?.text.length ?? 1) - 1 }[event.key];
    if (next === undefined || !tokens || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    choose(Math.max(0, Math.min(tokens.text.length - 1, next)));
  }
  const first = Math.max(0, Math.floor(scroll.top / ROW_PX) - MARGIN_ROWS);
  const last = Math.min(starts.length, Math.ceil((scroll.top + scroll.height) / ROW_PX) + MARGIN_ROWS);
  const scrolled = (event) => setScroll({ top: event.currentTarget.scrollTop, height: event.currentTarget.clientHeight });
  return html`<${Panel} title="Tokens" name="strip" extra=${html`<span>${number(tokens?.text.length ?? 0)} of ${number(total)}</span>
      <label>Colour by <select value=${params.colour ?? "origin"} onChange=${(event) => change({ colour: event.currentTarget.value }, true)}>
        ${Object.entries(all).map(([name, one]) => html`<option key=${name} value=${name} selected=${one === mode}>${one.title}</option>`)}</select></label>`}>
    <div class="strip" ref=${place}>
      <span class="cell" aria-hidden="true">${"0".repeat(20)}</span>
      <div class="keys">${mode.keys.map(([name, text]) => html`<span key=${text}><i class=${name}></i>${text}</span>`)}</div>
      <${Overview} tokens=${tokens} mode=${mode} total=${total} view=${starts.length ? [starts[Math.min(starts.length - 1, first)], starts[last] ?? total] : null} onJump=${(token) => (box.current.scrollTop = rowOf(starts, token) * ROW_PX)} />
      <div class="tokens" ref=${box} tabindex="0" role="group" aria-label="Tokens. The arrow keys choose one." onScroll=${scrolled} onKeyDown=${press}>
        ${error ? html`<p class="failed" role="alert">${harmless(error.message)}</p>` : null}
        ${tokens && total === 0 ? html`<p class="empty">No tokens were recorded.</p>` : null}
        <div class="all" style=${{ height: `${starts.length * ROW_PX}px` }}>
          ${starts.slice(first, last).map((from, index) => html`<${Row} key=${first + index} tokens=${tokens} from=${from} to=${starts[first + index + 1] ?? tokens.text.length}
            top=${(first + index) * ROW_PX} mode=${mode} chosen=${at} onChoose=${choose} />`)}</div>
      </div>
    </div>
    <div class="chosen">${tokens ? html`<${Chosen} tokens=${tokens} at=${at} />` : null}</div>
    ${tokens?.remarks?.length ? html`<ul class="remarks">${tokens.remarks.map((one) => html`<li key=${one}>${harmless(one)}</li>`)}</ul>` : null}<//>`;
}
