// How tokens are coloured, and the overview of all of them in one line.
import { html, useEffect, useRef } from "../../vendor/htm-preact.js";

const HUES = ["--c1", "--c2", "--c3", "--c4", "--c6"];
const UNSURE_NATS = 5;
const SMALL_NATS = 0.5;

const variable = (name, share) => `color-mix(in srgb, var(${name}) ${Math.round(share * 45)}%, transparent)`;
const plain = { name: "t0", back: "", hue: "" };

function painted(hue, share) {
  return { name: "", back: share < 0.02 ? "" : variable(hue, share), hue: share < 0.02 ? "" : hue, share };
}

const named = (name, hue) => ({ name, back: "", hue, share: 0.8 });

function difference(tokens, i) {
  const [trainer, engine] = [tokens.trainer[i], tokens.logprob[i]];
  if (trainer === null || engine === null) return plain;
  return painted(trainer > engine ? "--c3" : "--c5", Math.tanh(Math.abs(trainer - engine) / SMALL_NATS));
}

export function modes(tokens) {
  const versions = tokens ? [...new Set(tokens.version.filter((one) => one >= 0))].sort((a, b) => a - b) : [];
  const cyclic = (index) => (index < 0 ? plain : painted(HUES[index % HUES.length], 0.75));
  return {
    origin: { title: "origin", paint: (all, i) => [plain, named("t1", "--c1"), named("t2", "--c4")][all.origin[i]] ?? plain,
      keys: [["t0", "context"], ["t1", "sampled"], ["t2", "demonstrated"]] },
    mask: { title: "mask", paint: (all, i) => (all.mask[i] ? named("t3", "--c3") : plain), keys: [["t3", "trained on"], ["t0", "not trained on"]] },
    logprob: { title: "engine logprob", paint: (all, i) => (all.logprob[i] === null ? plain : painted("--c2", Math.min(1, -all.logprob[i] / UNSURE_NATS))),
      keys: [["t4", "unlikely"], ["t0", "likely, or not sampled"]] },
    difference: { title: "trainer minus engine", paint: difference, keys: [["t3", "likelier for the trainer"], ["t5", "less likely for the trainer"], ["t0", "equal, or not known"]] },
    version: { title: "version", paint: (all, i) => cyclic(versions.indexOf(all.version[i])),
      keys: versions.slice(0, 8).map((one, index) => [`h${index % HUES.length}`, `version ${one}`]) },
    policy: { title: "policy", paint: (all, i) => (all.origin[i] === 0 ? plain : cyclic(all.policy[i])),
      keys: (tokens?.policies ?? []).map((one, index) => [`h${index % HUES.length}`, one]) },
  };
}

// One column of pixels for every few tokens. A click jumps there.
export function Overview({ tokens, mode, total, view, onJump }) {
  const canvas = useRef(null);
  useEffect(() => {
    const { width, height } = canvas.current;
    const context = canvas.current.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    context.clearRect(0, 0, width, height);
    if (!tokens || !total) return;
    for (let x = 0; x < width; x += 1) {
      const { hue, share } = mode.paint(tokens, Math.min(tokens.text.length - 1, Math.floor((x / width) * total)));
      if (!hue || (x / width) * total >= tokens.text.length) continue;
      context.globalAlpha = 0.25 + 0.7 * share;
      context.fillStyle = style.getPropertyValue(hue);
      context.fillRect(x, 0, 1, height);
    }
  }, [tokens, mode.title, total]);
  const [from, to] = (view ?? [0, 0]).map((token) => `${(total ? token / total : 0) * 100}%`);
  const jump = (event) => {
    const { left, width } = canvas.current.getBoundingClientRect();
    onJump(Math.floor(((event.clientX - left) / width) * total));
  };
  return html`<div class="overview" aria-hidden="true" onClick=${jump}><canvas ref=${canvas} width="1200" height="14"></canvas>
    <i style=${{ left: from, width: `calc(${to} - ${from})` }}></i></div>`;
}
