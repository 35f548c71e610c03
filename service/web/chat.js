// One conversation: its turns as elements, loading them, sending a message and reading the answer as it streams.
// Goes on while another conversation is shown. Knows nothing of the message box or the list of conversations.

import { ApiError, events, getJson, inPlainWords, postJson, request } from "./api.js";
import { decodeRate, inWords, meter, tokensBySource } from "./bar.js";
import { announce, button, count, el, icon, plural } from "./dom.js";

const WELCOME = "Come back to any conversation whenever you like. What it has already read is kept, from fast memory "
  + "down to disk, and the bar with each answer shows where it came from.";
const TURNS_PAGE = 500;
const ENDINGS = { length: "The answer stops here: it reached the token limit.", abort: "You stopped this answer." };

export class Conversation {
  // changed(conversation): something that others show has changed. forked(session): a fork was made.
  constructor(id, { changed, forked }) {
    Object.assign(this, { id, changed, forked, session: null, draft: "", problem: null, answering: null, loaded: !id });
    this.turns = el("ol", { class: "turns" });
    this.element = el("div", { class: "conversation", role: "log", "aria-label": "Conversation" }, this.turns);
    this.pending = null; // the turn that is being answered, or has failed
    this.retry = null; // {text, key} of the message that failed: the same key makes sure that it is answered once
    if (!id) this.showEmpty();
  }

  get isAnswering() {
    return this.answering !== null;
  }

  showEmpty() {
    this.empty = el("div", { class: "empty" },
      el("h2", {}, "What would you like to talk about?"),
      el("p", { class: "quiet" }, WELCOME));
    this.element.prepend(this.empty);
  }

  async load() {
    this.element.setAttribute("aria-busy", "true");
    const session = await wholeSession(this.id);
    this.session = session;
    this.loaded = true;
    this.turns.replaceChildren();
    if (session.system) {
      const who = el("span", { class: "who" }, "System prompt");
      this.turns.append(el("li", { class: "system" }, who, textOf(session.system)));
    }
    for (const turn of session.turns_data) this.turns.append(this.turnElement(turn));
    if (!session.turns_data.length) this.showEmpty();
    this.element.removeAttribute("aria-busy");
    this.changed(this);
  }

  // A stored turn: what was said to the model, its answer, what it cost.
  turnElement(stored) {
    if (!stored.messages.length) return el("li", {}, dividerOf(stored.truncated_tokens)); // only a truncation
    const asked = stored.messages.filter((message) => message.role !== "assistant");
    const answer = stored.messages.findLast((message) => message.role === "assistant");
    const turn = turnParts(asked.map(textOf).join("\n\n"));
    turn.text.append(answer ? textOf(answer) : "");
    this.finish(turn, stored);
    return turn.element;
  }

  // What stands below and beside an answer once it is complete.
  finish(turn, result) {
    const { element, below, beside, answer } = turn;
    answer.removeAttribute("aria-busy");
    element.classList.remove("live");
    if (result.truncated_tokens > 0) element.prepend(dividerOf(result.truncated_tokens));
    const ending = ENDINGS[result.finish_reason];
    below.replaceChildren(
      ...(ending ? [el("p", { class: "ending" }, ending)] : []),
      el("div", { class: "tools" },
        button({ class: "ghost small", onclick: (event) => copy(turn.text.textContent, event.currentTarget.lastChild) },
          icon("copy"), "Copy"),
        button({ class: "ghost small", title: "A new conversation that starts with everything up to here",
          onclick: () => this.fork(result.turn) }, icon("fork"), "Fork from here")));
    beside.replaceChildren(result.usage?.prompt_tokens ? meter(result) : "");
  }

  async fork(turn) {
    try {
      this.forked(await postJson(`/sessions/${this.id}/fork`, { turn }));
    } catch (error) {
      this.problem = { ...inPlainWords(error), text: null };
      this.changed(this);
    }
  }

  // Sends a message and shows the answer as it comes. When it fails the text is in `problem.text`, to be tried again.
  async send(text) {
    this.empty?.remove();
    this.dropPending();
    this.problem = null;
    if (this.session) this.session.running = false;
    if (this.retry?.text !== text) this.retry = { text, key: randomKey() };
    const turn = (this.pending = turnParts(text));
    turn.startLive();
    this.turns.append(turn.element);
    this.answering = { abort: new AbortController(), sessionId: this.id, stopped: false };
    this.changed(this, { sent: true });
    announce("Waiting for the answer.");
    try {
      await this.readAnswer(turn, text);
      this.pending = this.retry = null;
    } catch (error) {
      this.failed(turn, text, error);
    } finally {
      turn.stopLive();
      this.answering = null;
      this.changed(this, { ended: true });
    }
  }

  async readAnswer(turn, text) {
    const { answering } = this;
    const body = { message: text, stream: true };
    if (this.id) body.session_id = this.id;
    const headers = { "Idempotency-Key": this.retry.key };
    const response = await request("POST", "/chat", { body, headers, signal: answering.abort.signal });
    let result = null;
    for await (const event of events(response)) {
      if (!answering.sessionId) {
        answering.sessionId = event.session_id;
        if (answering.stopped) this.stop();
      }
      if (event.usage) result = event;
      else if (event.delta?.content) this.say(turn, event.delta.content);
    }
    if (!result) throw new ApiError("the answer had no end", { code: "cut_off" });
    if (result.turn === null) throw new DOMException("stopped before anything was said", "AbortError");
    this.id = result.session_id;
    turn.text.textContent = textOf(result.message); // the complete text is the one that counts
    this.finish(turn, result);
    const rate = decodeRate(result.usage, result.timings);
    const speed = rate ? ` ${count(rate)} tokens per second.` : "";
    announce(`Answer complete. ${inWords(tokensBySource(result.usage))}.${speed}`);
  }

  say(turn, text) {
    turn.hear(text);
    this.changed(this, { said: true });
  }

  failed(turn, text, error) {
    const stopped = error.name === "AbortError";
    if (stopped) this.problem = { title: "Stopped before the answer began.", detail: "Your message is kept.", text };
    else this.problem = { ...inPlainWords(error), text, status: error.status };
    if (error.status === 404) this.problem.gone = true;
    announce("");
    if (!turn.text.textContent) return this.dropPending();
    turn.element.classList.add("failed");
    turn.answer.removeAttribute("aria-busy");
    turn.below.replaceChildren(el("p", { class: "ending" }, "Incomplete, and not stored."));
    turn.beside.replaceChildren();
  }

  dropPending() {
    this.pending?.element.remove();
    this.pending = null;
    if (this.empty && !this.turns.children.length) this.element.prepend(this.empty);
  }

  // Keeps what was said. Before the first event there is nothing to keep, nor a session to name: then once it is named,
  // or, pressed a second time, at once.
  async stop() {
    const { answering } = this;
    if (!answering) return;
    const again = answering.stopped;
    answering.stopped = true;
    this.changed(this);
    if (!answering.sessionId) {
      if (again) answering.abort.abort();
      return;
    }
    try {
      await request("POST", `/sessions/${answering.sessionId}/stop`, { body: {} });
    } catch {
      answering.abort.abort();
    }
  }
}

// The elements of one turn, and what happens in them while its answer streams.
function turnParts(question) {
  const text = document.createTextNode("");
  const said = el("div", { class: "text" }, text);
  const below = el("div", { class: "below-answer" });
  const answer = el("div", { class: "answer" }, el("span", { class: "unseen" }, "Answer: "), said, below);
  const beside = el("div", { class: "beside" });
  const you = el("span", { class: "unseen" }, "You: ");
  const asked = el("div", { class: "question" }, you, el("div", { class: "text" }, question));
  const element = el("li", { class: "turn" }, asked, answer, beside);
  const live = { start: performance.now(), first: null, pieces: 0, timer: null };
  const status = el("p", { class: "live-status" });
  const show = () => (status.textContent = liveWords(live));
  return {
    element, answer, below, beside, text: said,
    startLive() {
      element.classList.add("live");
      answer.setAttribute("aria-busy", "true");
      beside.replaceChildren(status);
      show();
      live.timer = setInterval(show, 250);
    },
    hear(piece) {
      live.first ??= performance.now();
      live.pieces += 1;
      text.appendData(piece);
    },
    stopLive() {
      clearInterval(live.timer);
      element.classList.remove("live");
    },
  };
}

function liveWords({ start, first, pieces }) {
  const now = performance.now();
  if (first === null) return now - start < 1500 ? "Reading…" : `Reading… ${Math.round((now - start) / 1000)} s`;
  const rate = now - first > 400 ? (pieces - 1) / ((now - first) / 1000) : 0;
  return rate > 0 ? `${rate < 10 ? rate.toFixed(1) : count(rate)} tokens/s` : "Answering…";
}

function dividerOf(tokens) {
  const words = `${plural(tokens, "token")} of the oldest turns ${tokens === 1 ? "is" : "are"} no longer in the window`;
  return el("p", { class: "divider" }, el("span", {}, words));
}

// A session with all of its turns; the service gives them in pages.
async function wholeSession(id) {
  const session = await getJson(`/sessions/${id}?limit=${TURNS_PAGE}`);
  for (let page = session; page.has_more && page.turns_data.length; ) {
    page = await getJson(`/sessions/${id}?limit=${TURNS_PAGE}&turns_after=${page.turns_data.at(-1).turn}`);
    session.turns_data.push(...page.turns_data);
  }
  return session;
}

// A message's content is a string, or a list of parts of which only the text counts here.
function textOf(message) {
  const { content } = message;
  if (Array.isArray(content)) return content.map((part) => part.text ?? "").join("");
  return content ?? "";
}

// shown: the button's text, which says for a moment how it went.
async function copy(text, shown) {
  try {
    await navigator.clipboard.writeText(text);
    shown.data = "Copied";
  } catch {
    shown.data = "Not allowed by the browser"; // as on pages that do not come over HTTPS
  }
  announce(shown.data);
  setTimeout(() => (shown.data = "Copy"), 2000);
}

function randomKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
