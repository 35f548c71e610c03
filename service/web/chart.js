// A line chart as SVG: some series over the last minutes, three grid lines, the latest values as its text alternative.

import { numberOf } from "./bar.js";
import { el, svg } from "./dom.js";

const HEIGHT = 132;
const LEFT = 4, RIGHT = 4, TOP = 16, BOTTOM = 20;

// series: [{name, label, points: [{seconds, value}]}]; value null: nothing is known there. format writes a value.
// most: the scale's end where it is fixed; least: its smallest end where it is not. windowS: its width in seconds.
export function chart({ title, series, format, most, least = 0, windowS, nowS, width }) {
  const values = series.flatMap(({ points }) => points.map(({ value }) => value)).filter(Number.isFinite);
  const top = most ?? niceEnd(Math.max(least, ...values));
  const x = (seconds) => LEFT + (width - LEFT - RIGHT) * (1 - (nowS - seconds) / windowS);
  const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - Math.min(value, top) / (top || 1));
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${HEIGHT}`, width, height: HEIGHT, "aria-hidden": "true" });
  for (const share of [0, 0.5, 1]) {
    const at = Math.round(y(top * share)) + 0.5;
    drawing.append(svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }));
    if (share && top) drawing.append(svg("text", { x: LEFT, y: at - 4 }, format(top * share)));
  }
  drawing.append(
    svg("text", { x: LEFT, y: HEIGHT - 4 }, `${Math.round(windowS / 60)} min ago`),
    svg("text", { x: width - RIGHT, y: HEIGHT - 4, "text-anchor": "end" }, "now"));
  for (const { name, points } of series) {
    const shown = points.filter(({ seconds }) => nowS - seconds <= windowS);
    for (const run of runs(shown)) drawing.append(...marks(run, name, x, y));
  }
  const latest = series.map(({ name, label, points }) => ({ name, label, value: points.at(-1)?.value }));
  const words = latest.map(({ label, value }) => `${label} ${said(value, format)}`).join(", ");
  return el("figure", { class: "chart", role: "img", "aria-label": `${title}, now: ${words}` },
    el("figcaption", {}, el("h3", {}, title), el("ul", { class: "counts" },
      ...latest.map(({ name, label, value }) => numberOf(name, label, said(value, format))))),
    drawing);
}

const said = (value, format) => (Number.isFinite(value) ? format(value) : "–");

// Stretches of points without a gap.
function runs(points) {
  const found = [];
  let run = [];
  for (const point of points) {
    if (Number.isFinite(point.value)) run.push(point);
    else if (run.length) found.push(run.splice(0));
  }
  return run.length ? [...found, run] : found;
}

function marks(run, name, x, y) {
  const at = run.map(({ seconds, value }) => `${x(seconds).toFixed(1)},${y(value).toFixed(1)}`);
  const [first, last] = [run[0], run.at(-1)];
  if (first === last) return [svg("circle", { class: `mark ${name}`, cx: x(first.seconds), cy: y(first.value), r: 2 })];
  const ends = [`${x(last.seconds).toFixed(1)},${y(0)}`, `${x(first.seconds).toFixed(1)},${y(0)}`];
  return [
    svg("polygon", { class: `area ${name}`, points: [...at, ...ends].join(" ") }),
    svg("polyline", { class: `line ${name}`, points: at.join(" ") }),
  ];
}

// The next of 1, 2, 5, 10, ... times a power of 1,024 or 10: a scale that does not jump with every reading.
function niceEnd(value) {
  if (value <= 0) return 0;
  const unit = value >= 1024 ? 1024 ** Math.floor(Math.log(value) / Math.log(1024)) : 1;
  const power = 10 ** Math.floor(Math.log10(value / unit));
  return [1, 2, 5, 10].map((step) => step * power * unit).find((end) => end >= value) ?? 10 * power * unit;
}
