// Line charts of uPlot: one size before and after the data, one value shown in the header, points
// that can be opened with the mouse and with the keyboard.
import { html, useEffect, useRef, useState } from "../vendor/htm-preact.js";
import { number } from "./format.js";

const COLOURS = ["--c2", "--c4", "--c1", "--c3", "--c5", "--c6"];
const HEIGHT = 132;
const DRAG_PX = 4;

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function axes(time, format) {
  const shared = {
    stroke: colour("--muted"),
    grid: { stroke: colour("--grid"), width: 1 },
    ticks: { show: false },
    font: "11px system-ui, sans-serif",
  };
  const whole = (_, splits) => splits.map((value) => (Number.isInteger(value) ? value : ""));
  const clock = (_, splits) => splits.map((value) => new Date(value * 1000).toTimeString().slice(0, 5));
  return [
    { ...shared, size: 22, grid: { show: false }, values: time ? clock : whole, space: time ? 60 : 40 },
    { ...shared, size: 46, space: 26, values: (_, splits) => splits.map((value) => format(value)) },
  ];
}

// Vertical lines from low to high, as the intervals of evaluations.
function intervals(pairs) {
  return (plot) => {
    const { ctx } = plot;
    ctx.save();
    ctx.lineWidth = devicePixelRatio;
    for (const [low, high, stroke] of pairs) {
      ctx.strokeStyle = colour(stroke);
      ctx.beginPath();
      plot.data[0].forEach((x, index) => {
        if (plot.data[low][index] === null || plot.data[low][index] === undefined) return;
        const at = plot.valToPos(x, "x", true);
        ctx.moveTo(at, plot.valToPos(plot.data[low][index], "y", true));
        ctx.lineTo(at, plot.valToPos(plot.data[high][index], "y", true));
      });
      ctx.stroke();
    }
    ctx.restore();
  };
}

// lines: [{name, values, low, high, interval, dots}]. Low and high are drawn as a band, or as
// intervals.
function prepare(xs, lines, time, format) {
  const [data, series, bands, bars] = [[xs], [{}], [], []];
  lines.forEach((line, index) => {
    const stroke = line.colour ?? COLOURS[index % COLOURS.length];
    if (line.low) {
      const first = data.push(line.low, line.high) - 2;
      series.push({ stroke: "transparent", points: { show: false } }, { stroke: "transparent", points: { show: false } });
      if (line.interval) bars.push([first, first + 1, stroke]);
      else bands.push({ series: [first + 1, first], fill: `${colour(stroke)}26` });
    }
    data.push(line.values);
    const dots = line.dots || xs.length < 2;
    series.push({ stroke: colour(stroke), width: 1.6, spanGaps: true, points: { show: dots, size: 5, fill: colour(stroke) } });
  });
  const options = {
    height: HEIGHT,
    series,
    bands,
    legend: { show: false },
    padding: [8, 10, 0, 0],
    scales: { x: { time } },
    axes: axes(time, format),
    hooks: { draw: bars.length ? [intervals(bars)] : [] },
    cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false } },
  };
  return { data, options };
}

function useTheme() {
  const [theme, set] = useState(0);
  useEffect(() => {
    const media = matchMedia("(prefers-color-scheme: dark)");
    const changed = () => set((count) => count + 1);
    media.addEventListener("change", changed);
    return () => media.removeEventListener("change", changed);
  }, []);
  return theme;
}

// xs ascends: versions, or epoch seconds if `time`. `onPick(index)` opens a point.
export function Chart({ title, xs, lines, time = false, format = number, spell = String, onPick, empty = "No values yet." }) {
  const [place, plot, pick] = [useRef(null), useRef(null), useRef(null)];
  const [at, setAt] = useState(null);
  const theme = useTheme();
  pick.current = onPick;
  const some = lines.some((line) => line.values.some((value) => value !== null && value !== undefined));
  const shape = JSON.stringify([some, theme, lines.map((line) => [line.name, Boolean(line.low)])]);
  useEffect(() => {
    if (!some) return undefined;
    const { data, options } = prepare(xs, lines, time, format);
    options.width = Math.max(80, place.current.clientWidth);
    options.hooks.setCursor = [(chart) => setAt(chart.cursor.idx ?? null)];
    const made = new uPlot(options, data, place.current);
    plot.current = made;
    const unbind = bindClicks(made, pick);
    const observer = new ResizeObserver(() => {
      const width = place.current?.clientWidth;
      if (width) made.setSize({ width, height: HEIGHT });
    });
    observer.observe(place.current);
    return () => {
      unbind();
      observer.disconnect();
      made.destroy();
      plot.current = null;
    };
  }, [shape]);
  useEffect(() => {
    if (plot.current) plot.current.setData(prepare(xs, lines, time, format).data, plot.current.scales.x.min === undefined || whole(plot.current));
  }, [xs, lines]);
  const index = at === null || at >= xs.length ? lastKnown(lines) : at;
  const said = index === null ? "" : `${spell(xs[index])}: ${lines.map((line) => `${lines.length > 1 ? `${line.name} ` : ""}${format(line.values[index])}`).join(", ")}`;
  return html`<figure class="chart">
    <figcaption><span class="title">${title}<span>${at === null || index === null ? "" : ` at ${spell(xs[index])}`}</span></span>
      <${Legend} lines=${lines} index=${index} format=${format} /></figcaption>
    <div class="plot" ref=${place} ...${some && onPick ? slider(title, said, index, xs, plot, pick, setAt) : { role: "img", "aria-label": `${title}. ${said || empty}` }}>
      ${some ? null : html`<p class="empty">${empty}</p>`}
    </div>
  </figure>`;
}

const whole = (chart) => chart.scales.x.min <= chart.data[0][0] && chart.scales.x.max >= chart.data[0].at(-1);

function Legend({ lines, index, format }) {
  return html`<span class="legend">${lines.map((line, i) => html`<span key=${line.name}>
      ${lines.length > 1 ? html`<i class=${(line.colour ?? COLOURS[i % COLOURS.length]).slice(2)}></i>${line.name}` : null}
      <b>${index === null ? "–" : format(line.values[index])}</b></span>`)}</span>`;
}

function lastKnown(lines) {
  const last = Math.max(...lines.map((line) => line.values.findLastIndex((value) => value !== null && value !== undefined)));
  return last < 0 ? null : last;
}

function bindClicks(chart, pick) {
  let down = 0;
  const press = (event) => (down = event.clientX);
  const click = (event) => {
    if (Math.abs(event.clientX - down) < DRAG_PX && chart.cursor.idx !== null) pick.current?.(chart.cursor.idx);
  };
  chart.over.addEventListener("mousedown", press);
  chart.over.addEventListener("click", click);
  return () => {
    chart.over.removeEventListener("mousedown", press);
    chart.over.removeEventListener("click", click);
  };
}

// Left and right move the point, Home and End jump, Enter opens it.
function slider(title, said, index, xs, plot, pick, setAt) {
  function press(event) {
    const now = index ?? xs.length - 1;
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: xs.length - 1 }[event.key];
    if (event.key === "Enter") pick.current?.(now);
    if (next === undefined) return;
    event.preventDefault();
    const kept = Math.max(0, Math.min(xs.length - 1, next));
    setAt(kept);
    plot.current?.setCursor({ left: plot.current.valToPos(xs[kept], "x"), top: 10 }, false);
  }
  return {
    role: "slider", tabindex: 0, onKeyDown: press, "aria-label": title, "aria-valuetext": said,
    "aria-valuemin": 0, "aria-valuemax": xs.length - 1, "aria-valuenow": index ?? 0,
  };
}
