// The view of the tiers: how full each is, where prompts found their tokens, what is read and written; and the health.
// Asks /metrics and /health every two seconds while it is shown. Knows no conversation.

import { inPlainWords, request } from "./api.js";
import { bar, counts, inWords } from "./bar.js";
import { chart } from "./chart.js";
import { bytes, count, el, percent } from "./dom.js";
import { History, Reading } from "./metrics.js";

const EVERY_MS = 2000;
const WINDOW_S = 300;
const WIDTHS_S = [60, 120, WINDOW_S]; // a chart is as wide as it needs to be for what is known
const SMOOTH = 15; // readings that a hit rate is taken over: 30 s
const TIERS = [
  { name: "hbm", label: "HBM", help: "The engine's own memory: what is running, and what ran last" },
  { name: "cpu", label: "CPU", help: "Main memory: what was used lately, ready to load" },
  { name: "disk", label: "Disk", help: "What survives a restart" },
];

const SHARED = { name: "remote", label: "Shared", help: "What servers share, behind their disks" };

const STATES = {
  ok: "All well",
  degraded: "Degraded: it goes on answering",
  starting: "Starting",
  stopping: "Stopping",
  failed: "The engine has failed",
  unreachable: "The server cannot be reached",
};
const ENGINE_GONE = { title: "The engine does not answer at the moment.", detail: "These are its last numbers." };
const REASONS = {
  stats_unavailable: "The engine is too busy, or gone, to show its numbers.",
  disk_degraded: "The disk tier cannot write at the moment. Nothing new is kept on disk; it is tried again by itself.",
  remote_degraded: "The shared tier does not answer at the moment. What only it holds is computed; it is tried again by itself.",
  prefill_degraded: "The server that computes prompts for this one does not answer. This one computes them.",
  replica_down: "One of the engines has ended. It is being started again.",
  session_store_unreachable: "The Redis with the shared conversations does not answer. No turn can be stored.",
  draining: "This server takes no more requests. It is about to be stopped.",
  disk_broken: "The disk tier was damaged and has been set aside. What it held is computed again.",
  disk_was_reset: "The disk tier was damaged and began anew, empty.",
  disk_file_lost: "A file of the disk tier was removed or replaced while it was open. What it held is computed again.",
  store_lost: "The store's directory was removed or replaced while it was open. Nothing more is kept.",
  sessions_file_lost: "The file of conversations was removed or replaced while it was open. No turn is kept any more.",
  sessions_missing: "This store had conversations, and their file was missing at the start.",
  sessions_damaged: "Some conversations are damaged. Each says which of its turns are whole; a fork there goes on.",
  answers_failing: "Answers cannot be stored at the moment: after a restart, histories that hold them may be computed again.",
  sessions_failing: "Conversations cannot be stored at the moment.",
  engine_not_answering: "The engine has not answered for several seconds.",
  engine_restarting: "The engine ended and is being started again. What ran has ended with an error.",
  engine_failed: "The engine has stopped. The server needs to be started again.",
};

export class Tiers {
  // healthSeen(health): called with every answer of /health.
  constructor(element, { healthSeen }) {
    Object.assign(this, { element, healthSeen, visible: false, health: null, problem: null, asking: false });
    this.history = new History(WINDOW_S * 1000 / EVERY_MS + 1);
    setInterval(() => this.poll(), EVERY_MS);
    window.addEventListener("resize", () => this.visible && this.render());
  }

  setVisible(visible) {
    if (visible && !this.visible) {
      this.visible = true;
      this.problem = null;
      this.render();
      this.poll();
    }
    this.visible = visible;
  }

  async fetchHealth() {
    try {
      const response = await fetch("/health", { cache: "no-store", credentials: "omit" });
      this.health = await response.json();
    } catch {
      this.health = { status: "unreachable" };
    }
    return this.health;
  }

  async poll() {
    if (!this.visible || document.hidden || this.asking) return;
    this.asking = true;
    try {
      this.healthSeen(await this.fetchHealth());
      const text = await (await request("GET", "/metrics", { quiet: this.problem !== null })).text();
      const reading = new Reading(text, performance.now() / 1000);
      this.problem = reading.value("engine_up") === 0 ? ENGINE_GONE : null;
      if (!this.problem) this.history.add(reading, "prompt_tokens_total");
    } catch (error) {
      this.problem = inPlainWords(error);
    }
    this.asking = false;
    if (this.visible) this.render();
  }

  render() {
    const reading = this.history.last;
    const parts = [this.healthElement()];
    if (this.problem) {
      const { title, detail } = this.problem;
      parts.push(el("div", { class: "notice" }, el("div", {}, el("b", {}, title), " ", detail)));
    }
    if (reading) {
      const cards = TIERS.map((tier) => card(tier, reading));
      if (reading.value("remote_up") !== undefined) cards.push(sharedCard(reading));
      parts.push(this.overview(reading), el("div", { class: "cards" }, ...cards), this.charts());
    } else if (!this.problem) parts.push(el("p", { class: "quiet" }, "Reading the server's numbers…"));
    const { scrollTop } = this.element;
    this.element.replaceChildren(el("div", { class: "tiers" }, ...parts));
    this.element.scrollTop = scrollTop;
  }

  healthElement() {
    const { status, reasons } = this.health ?? {};
    const list = [reasons ?? []].flat();
    return el("section", { class: "state", "data-status": status ?? "unknown", "aria-label": "Health" },
      el("span", { class: "dot" }), el("b", {}, STATES[status] ?? status ?? "Asking the server…"),
      list.length > 0 && el("ul", {}, ...list.map((reason) => el("li", {}, REASONS[reason] ?? String(reason)))));
  }

  overview(reading) {
    const tokens = sourcesOf(reading);
    const all = Object.values(tokens).reduce((sum, value) => sum + value, 0);
    return el("section", { class: "overview" },
      el("div", { class: "headline" },
        el("h2", {}, "Prompt tokens since the server started"),
        el("span", {}, el("b", {}, percent(all - tokens.computed, all)), " cached")),
      all ? bar(tokens, inWords(tokens)) : el("p", { class: "quiet" }, "No prompt yet."),
      all > 0 && counts(tokens));
  }

  charts() {
    const width = Math.max(240, Math.min(this.element.clientWidth - 64, 900));
    const wide = width > 640 ? (width - 48) / 2 : width;
    const nowS = performance.now() / 1000;
    const knownS = nowS - this.history.readings[0].seconds;
    const windowS = WIDTHS_S.find((seconds) => seconds >= knownS) ?? WINDOW_S;
    const shared = { windowS, nowS };
    const of = (metric) => [...TIERS, SHARED].filter(({ name }) => this.history.last.value(metric, { tier: name }) !== undefined)
      .map(({ name, label }) => ({ name, label, points: this.history.rate(metric, { tier: name }) }));
    const hits = { name: "hits", label: "last 30 s", points: this.history.series(hitRate, SMOOTH) };
    const traffic = { width: wide, least: 2 ** 20, format: (value) => `${bytes(value)}/s` };
    return el("section", { class: "charts", "aria-label": "The last minutes" },
      chart({ ...shared, title: "Hit rate", width, most: 1, format: (value) => percent(value, 1), series: [hits] }),
      chart({ ...shared, ...traffic, title: "Reads", series: of("tier_read_bytes_total") }),
      chart({ ...shared, ...traffic, title: "Writes", series: of("tier_write_bytes_total") }));
  }
}

function sourcesOf(reading) {
  const value = (name, labels) => reading.value(name, labels) ?? 0;
  const tokens = Object.fromEntries([...TIERS, SHARED].map(({ name }) => [name, value("tier_hit_tokens_total", { tier: name })]));
  tokens.reencoded = value("reencoded_tokens_total");
  tokens.computed = Math.max(0, value("prompt_tokens_total") - value("cached_prompt_tokens_total"));
  return tokens;
}

function hitRate(newer, older) {
  const asked = newer.value("prompt_tokens_total") - older.value("prompt_tokens_total");
  const found = newer.value("cached_prompt_tokens_total") - older.value("cached_prompt_tokens_total");
  return asked > 0 ? found / asked : null;
}

function card({ name, label, help }, reading) {
  const used = reading.value("tier_used_bytes", { tier: name }) ?? 0;
  const limit = reading.value("tier_limit_bytes", { tier: name }) ?? 0;
  const hits = reading.value("tier_hit_tokens_total", { tier: name }) ?? 0;
  const fill = el("span", { class: `part ${name}` });
  fill.style.width = `${limit ? Math.min(100, (100 * used) / limit) : 0}%`;
  const words = limit ? `${bytes(used)} of ${bytes(limit)}` : "off";
  const values = { "aria-valuemin": 0, "aria-valuemax": limit, "aria-valuenow": used, "aria-valuetext": words };
  return el("section", { class: "card" },
    el("div", { class: "headline" }, el("h2", {}, label),
      el("span", {}, el("b", {}, limit ? percent(used, limit) : "off"), limit ? " used" : "")),
    el("div", { class: "gauge", role: "meter", "aria-label": `${label} used`, ...values }, fill),
    el("p", { class: "numbers" }, words),
    el("p", { class: "quiet" }, help),
    el("p", { class: "numbers" }, el("b", {}, count(hits)), " tokens found here"));
}

// How much it holds is not known here: what was read and stored, and whether it answers.
function sharedCard(reading) {
  const value = (name) => reading.value(name, { tier: SHARED.name }) ?? 0;
  const state = !reading.value("remote_up") ? "away" : reading.value("remote_full") ? "full" : "answers";
  return el("section", { class: "card" },
    el("div", { class: "headline" }, el("h2", {}, SHARED.label), el("span", {}, el("b", {}, state))),
    el("p", { class: "numbers" },
      `${bytes(value("tier_read_bytes_total"))} read, ${bytes(value("tier_write_bytes_total"))} stored`),
    el("p", { class: "quiet" }, SHARED.help),
    el("p", { class: "numbers" }, el("b", {}, count(value("tier_hit_tokens_total"))), " tokens found here"));
}
