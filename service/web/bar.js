// Where a prompt's tokens came from: the bar, its numbers, its legend. Knows usage and timings of a turn.

import { button, count, duration, el, percent, plural } from "./dom.js";

export const SOURCES = [
  { name: "hbm", label: "HBM", phrase: "from HBM",
    help: "High-bandwidth memory, of the device that computes (on a CPU: the engine's part of RAM). These tokens were still there." },
  { name: "cpu", label: "CPU", phrase: "from CPU memory", help: "These tokens were loaded from the CPU's memory." },
  { name: "disk", label: "Disk", phrase: "from disk", help: "These tokens were loaded from disk, which survives a restart." },
  { name: "remote", label: "Shared", phrase: "from the shared tier", help: "These tokens were read from what servers share." },
  { name: "reencoded", label: "Re-encoded", phrase: "re-encoded",
    help: "The oldest turns left a full window. What these tokens had was kept, and turned to their new positions." },
  { name: "computed", label: "Computed", phrase: "computed", help: "No tier held these tokens: the model worked them out." },
];
const TTFT = "Time to first token: from your message's arrival to the first piece of the answer.";

// {source: tokens}; what no tier held was computed.
export function tokensBySource(usage) {
  const prompt = usage?.prompt_tokens_details ?? {};
  const cached = prompt.cached_tokens ?? 0;
  const details = prompt.cached_tokens_details ?? {};
  const tokens = Object.fromEntries(SOURCES.map(({ name }) => [name, details[name] ?? 0]));
  tokens.computed = Math.max(0, (usage?.prompt_tokens ?? 0) - cached);
  return tokens;
}

export function bar(tokens, label) {
  const parts = SOURCES.filter(({ name }) => tokens[name] > 0).map(({ name }) => {
    const part = el("span", { class: `part ${name}` });
    part.style.flexGrow = tokens[name];
    return part;
  });
  return el("div", { class: "bar", role: "img", "aria-label": label }, ...parts);
}

export function counts(tokens) {
  const used = SOURCES.filter(({ name }) => tokens[name] > 0);
  return el("ul", { class: "counts" }, ...used.map(({ name, label }) => numberOf(name, label, count(tokens[name]))));
}

// A line of such a list: the colour of `name`, its label, its number.
export function numberOf(name, label, number) {
  const help = SOURCES.find((source) => source.name === name)?.help;
  return el("li", { class: name, title: help }, el("span", { class: "swatch" }), el("span", { class: "label" }, label),
    el("span", { class: "number" }, number));
}

export function inWords(tokens) {
  const all = SOURCES.reduce((sum, { name }) => sum + tokens[name], 0);
  const parts = everywhere(tokens).map(({ name, phrase }) => `${count(tokens[name])} ${phrase}`);
  return `${plural(all, "prompt token")}: ${parts.join(", ")}`;
}

// Few servers share a tier: it is named where something came from there.
function everywhere(tokens) {
  return SOURCES.filter(({ name }) => name !== "remote" || tokens.remote > 0);
}

export function legend() {
  const terms = everywhere({}).map(({ name, label, help }) =>
    el("li", { class: name }, el("span", { class: "swatch" }), term(name, label, help)));
  return [...terms, el("li", {}, term("ttft", "TTFT", TTFT))];
}

// A word that explains itself to who points at it, or comes to it with the keyboard.
function term(name, label, help) {
  const id = `help-${name}`;
  return el("span", { class: "term" }, button({ "aria-describedby": id }, label),
    el("span", { id, class: "help", role: "tooltip" }, help));
}

// Tokens a second after the first one, or null where there are too few to tell.
export function decodeRate(usage, timings) {
  const tokens = (usage?.completion_tokens ?? 0) - 1;
  return tokens > 0 && timings?.decode_s > 0 ? tokens / timings.decode_s : null;
}

// What one turn cost. turn: {usage, timings}, from a stored turn or a stream's last event.
export function meter(turn) {
  const tokens = tokensBySource(turn.usage);
  const prompt = turn.usage?.prompt_tokens ?? 0;
  const cached = prompt - tokens.computed;
  const ttft = turn.timings?.ttft_s;
  const words = `${inWords(tokens)}.${ttft == null ? "" : ` First token after ${duration(ttft)}.`}`;
  return el("figure", { class: "meter" },
    el("div", { class: "headline" },
      el("span", {}, el("b", {}, percent(cached, prompt)), " cached"),
      ttft != null && el("span", { title: TTFT }, el("b", {}, duration(ttft)), " TTFT")),
    bar(tokens, words),
    counts(tokens),
    timings(turn));
}

function timings({ usage, timings: times }) {
  const rate = decodeRate(usage, times);
  const rows = [
    ["Prompt", plural(usage?.prompt_tokens ?? 0, "token")],
    ["Answer", plural(usage?.completion_tokens ?? 0, "token")],
    ["In queue", duration(times?.queue_s)],
    ["Loading", duration(times?.load_s)],
    ["Prefill", duration(times?.prefill_s)],
    ["Decoding", duration(times?.decode_s)],
    ["Speed", rate == null ? "–" : `${rate < 10 ? rate.toFixed(1) : count(rate)} tokens/s`],
  ];
  return el("details", {}, el("summary", {}, "Details"),
    el("dl", {}, ...rows.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
}
