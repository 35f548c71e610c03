// One conversation: its turns as elements, loading them, sending a message and reading the answer as it streams.
// Goes on while another conversation is shown. Knows nothing of the message box or the list of conversations.

import { ApiError, events, getJson, inPlainWords, mayPass, postJson, request } from "./api.js";
import { decodeRate, inWords, tokensBySource } from "./bar.js";
import { announce, button, count, el, icon } from "./dom.js";
import { Turn, dividerOf, exchangesOf, systemOf, textOf } from "./turn.js";

const WELCOME = "Come back to any conversation whenever you like. What it has already read is kept, from fast memory "
  + "down to disk, and the bar with each answer shows where it came from.";
const TURNS_PAGE = 500;

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
    this.empty?.remove();
    if (session.system) this.turns.append(el("li", {}, systemOf(session.system)));
    for (const turn of session.turns_data) this.turns.append(...this.elementsOf(turn));
    if (!session.turns_data.length) this.showEmpty();
    this.element.removeAttribute("aria-busy");
    this.changed(this);
  }

  // A stored turn: what was said to the model, its answer, what it cost.
  elementsOf(stored) {
    if (!stored.messages.length) return [el("li", {}, dividerOf(stored.truncated_tokens))]; // only a truncation
    const exchanges = exchangesOf(stored.messages);
    const last = exchanges.pop();
    const turn = new Turn(last.asked);
    this.finish(turn, last.answer ? textOf(last.answer) : "", stored);
    return [...exchanges.map(earlierElement), turn.element];
  }

  finish(turn, text, result) {
    const fork = { class: "ghost small", title: "A new conversation that starts with everything up to here" };
    turn.finish(text, result,
      button({ ...fork, onclick: () => this.fork(result.turn) }, icon("fork"), "Fork from here"));
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
    this.dropPending();
    this.empty?.remove(); // comes back with `dropPending`, where nothing was said
    this.problem = null;
    if (this.session) this.session.running = false;
    if (this.retry?.text !== text) this.retry = { text, key: randomKey() };
    const turn = new Turn([{ role: "user", content: text }], () => this.changed(this, { said: true }));
    this.pending = turn;
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
      else if (event.delta?.content) turn.hear(event.delta.content);
    }
    if (!result) throw new ApiError("the answer had no end", { code: "cut_off" });
    if (result.turn === null) throw new DOMException("stopped before anything was said", "AbortError");
    this.id = result.session_id;
    this.finish(turn, textOf(result.message), result);
    const rate = decodeRate(result.usage, result.timings);
    const speed = rate ? ` ${count(rate)} tokens per second.` : "";
    announce(`Answer complete. ${inWords(tokensBySource(result.usage))}.${speed}`);
  }

  failed(turn, text, error) {
    const stopped = error.name === "AbortError";
    const words = { title: "Stopped before the answer began.", detail: "Your message is kept." };
    this.problem = { ...(stopped ? words : inPlainWords(error)), text, again: stopped || mayPass(error) };
    if (error.status === 404) this.problem.gone = true;
    announce("");
    turn.text ? turn.fail() : this.dropPending();
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

// A session with all of its turns; the service gives them in pages.
async function wholeSession(id) {
  const session = await getJson(`/sessions/${id}?limit=${TURNS_PAGE}`);
  for (let page = session; page.has_more && page.turns_data.length; ) {
    page = await getJson(`/sessions/${id}?limit=${TURNS_PAGE}&turns_after=${page.turns_data.at(-1).turn}`);
    session.turns_data.push(...page.turns_data);
  }
  return session;
}

function earlierElement({ asked, answer }) {
  const turn = new Turn(asked);
  turn.finishEarlier(textOf(answer));
  return turn.element;
}

function randomKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
