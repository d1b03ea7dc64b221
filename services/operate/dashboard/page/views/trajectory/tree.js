// The tree of turns, drawn as lanes: a turn continues the lane of its parent, a branch opens one.
import { html } from "../../vendor/htm-preact.js";
import { number } from "../../lib/format.js";
import { link, parse } from "../../lib/route.js";
import { harmless } from "../../lib/text.js";

const [ROW, LANE, LEFT] = [30, 14, 12];
const MOST_LANES = 6;

// The last turns of all branches, in order.
export function leaves(turns) {
  const parents = new Set(turns.map((turn) => turn.parent));
  return turns.filter((turn) => !parents.has(turn.index)).map((turn) => turn.index);
}

// The indices from the root to a turn.
export function path(turns, last) {
  const known = new Map(turns.map((turn) => [turn.index, turn]));
  const found = [];
  for (let at = known.get(last); at && found.length < turns.length; at = known.get(at.parent)) found.unshift(at.index);
  return found;
}

// The lane of each turn: the first child stays in its parent's lane.
export function lanes(turns) {
  const lane = new Map();
  const continued = new Set();
  let next = 0;
  for (const turn of turns) {
    if (lane.has(turn.parent) && !continued.has(turn.parent)) {
      lane.set(turn.index, lane.get(turn.parent));
      continued.add(turn.parent);
    } else lane.set(turn.index, next++);
  }
  return lane;
}

function note(turn) {
  if (turn.demonstrated) return "demonstrated";
  return turn.role && turn.role !== "policy" ? harmless(turn.role) : harmless(turn.policy);
}

export function Tree({ turns, chosen, params }) {
  if (!turns.length) return html`<p class="empty">No turns yet.</p>`;
  const lane = lanes(turns);
  const row = new Map(turns.map((turn, index) => [turn.index, index]));
  const x = (turn) => LEFT + Math.min(lane.get(turn.index), MOST_LANES) * LANE;
  const y = (turn) => row.get(turn.index) * ROW + ROW / 2;
  const width = LEFT * 2 + Math.min(MOST_LANES, Math.max(...lane.values())) * LANE;
  const on = new Set(chosen);
  const ends = new Set(leaves(turns));
  const here = parse(location.hash);
  // A turn of another branch opens the branch of its first leaf.
  const branchOf = (turn) => on.has(turn.index) ? params.branch : [...ends].find((end) => path(turns, end).includes(turn.index));
  return html`<div class="tree scroll" tabindex="0" role="group" aria-label="Turns">
    <svg width=${width} height=${turns.length * ROW} aria-hidden="true">
      ${turns.filter((turn) => row.has(turn.parent)).map((turn) => {
        const from = turns[row.get(turn.parent)];
        return html`<path key=${turn.index} class=${on.has(turn.index) ? "on" : ""}
          d=${`M${x(from)},${y(from)} C${x(from)},${y(from) + ROW * 0.6} ${x(turn)},${y(from) + ROW * 0.4} ${x(turn)},${y(from) + ROW} L${x(turn)},${y(turn)}`} />`;
      })}
      ${turns.map((turn) => html`<circle key=${turn.index} cx=${x(turn)} cy=${y(turn)} r="4"
        class=${`${on.has(turn.index) ? "on" : ""} ${turn.trainable ? "" : "masked"}`} />`)}
    </svg>
    <ol>${turns.map((turn) => html`<li key=${turn.index} class=${on.has(turn.index) ? "on" : ""}>
      <a style=${{ paddingLeft: `${width}px` }} href=${link([here.name, ...here.parts], { ...params, tab: "transcript", branch: branchOf(turn), turn: turn.index })}>
        <span>turn ${turn.index}</span><span class="muted">${note(turn)}</span>
        ${turn.tool_calls.length ? html`<span class="tool">${harmless(turn.tool_calls[0].name)}</span>` : null}
        <span class="count">${number(turn.tokens)}</span></a></li>`)}</ol>
  </div>`;
}
