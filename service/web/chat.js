// One conversation: its turns as elements, loading them, sending a message and reading the answer as it streams.
// Goes on while another conversation is shown. Knows nothing of the message box or the list of conversations.

import { ApiError, events, getJson, inPlainWords, mayPass, postJson, request } from "./api.js";
import { decodeRate, inWords, tokensBySource } from "./bar.js";
import { announce, button, count, el, icon } from "./dom.js";
import { sampling, systemPrompt } from "./settings.js";
import { Turn, dividerOf, exchangesOf, systemOf, textOf } from "./turn.js";

const TURNS_PAGE = 500;

export class Conversation {
  // changed(conversation): something that others show has changed. forked(session): a fork was made. again(conversation,
  // stored, text): a turn is to be said again. versionsOf(conversation, turn): what there is of it. open(id): another
  // conversation is wanted. welcome(): what an empty one shows.
  // before: of a version: {parent: {session_id, turn}, history, system, stored, personal}, what stays of another.
  constructor(id, { changed, forked, again, versionsOf, open, welcome }, before = null) {
    Object.assign(this, { id, changed, forked, again, versionsOf, open, welcome });
    Object.assign(this, { session: null, draft: "", problem: null, answering: null, loaded: !id });
    this.turns = el("ol", { class: "turns" });
    this.element = el("div", { class: "conversation", role: "log", "aria-label": "Conversation" }, this.turns);
    this.pending = null; // the turn that is being answered, or has failed
    this.retry = null; // {text, key} of the message that failed: the same key makes sure that it is answered once
    this.parent = before?.parent ?? null; // until the service has made it a session of its own
    this.history = before?.history ?? []; // messages that go before the next one
    this.isPersonal = before?.personal ?? false;
    this.show(before?.stored ?? [], before?.system ?? null);
    if (this.history.length) this.turns.append(...exchangesOf(this.history).map(earlierElement));
  }

  get isAnswering() {
    return this.answering !== null;
  }

  show(stored, system) {
    this.stored = stored; // turns, as the service shows them
    this.system = system;
    this.shown = new Map(); // their elements, by number
    this.turns.replaceChildren(...(system ? [el("li", {}, systemOf(system))] : []));
    this.empty?.remove();
    this.empty = null;
    for (const turn of stored) this.turns.append(...this.elementsOf(turn));
    if (!stored.length && this.loaded && !this.parent) this.showEmpty();
    this.offer();
  }

  showEmpty() {
    this.empty = this.welcome();
    this.element.prepend(this.empty);
  }

  async load() {
    this.element.setAttribute("aria-busy", "true");
    const session = await wholeSession(this.id);
    this.session = session;
    this.isPersonal = session.personal;
    this.loaded = true;
    this.show(session.turns_data, session.system);
    this.element.removeAttribute("aria-busy");
    this.changed(this);
  }

  // A stored turn: what was said to the model, its answer, what it cost.
  elementsOf(stored) {
    if (!stored.messages.length) { // only a truncation; or an edit, or what one has removed
      return stored.truncated_tokens ? [el("li", {}, dividerOf(stored.truncated_tokens))] : [];
    }
    const exchanges = exchangesOf(stored.messages);
    const last = exchanges.pop();
    const turn = new Turn(last.asked);
    this.finish(turn, stored);
    return [...exchanges.map(earlierElement), turn.element];
  }

  finish(turn, stored) {
    this.shown.set(stored.turn, turn);
    const fork = { class: "ghost small", title: "A new conversation that starts with everything up to here" };
    const again = { class: "ghost small again", title: "Answer this again, as another version" };
    const tools = [button({ ...fork, onclick: () => this.fork(stored.turn) }, icon("fork"), "Fork from here")];
    const text = questionIn(stored);
    if (text !== null) {
      tools.unshift(button({ ...again, onclick: () => this.again(this, stored, text) }, icon("again"), "Regenerate"));
    }
    turn.finish(exchangesOf(stored.messages).at(-1).answer ?? { content: "" }, stored, ...tools);
  }

  // Which versions there are, and the buttons of questions.
  offer() {
    for (const stored of this.stored) {
      const turn = this.shown.get(stored.turn);
      const text = turn && questionIn(stored);
      const edit = text != null && (() => turn.edit(text, (changed) => this.again(this, stored, changed)));
      turn?.offer(this.versionsOf(this, stored.turn), this.open, edit);
    }
  }

  editLast() {
    if (!this.isAnswering) this.shown.get(this.stored.at(-1)?.turn)?.tools.querySelector(".edit")?.click();
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
    const said = { role: "user", content: text };
    const turn = new Turn([said], () => this.changed(this, { said: true }));
    this.pending = turn;
    turn.startLive();
    this.turns.append(turn.element);
    this.element.classList.add("answering");
    this.answering = { abort: new AbortController(), sessionId: this.id, stopped: false };
    this.changed(this, { sent: true });
    announce("Waiting for the answer.");
    try {
      await this.readAnswer(turn, said);
      this.pending = this.retry = null;
    } catch (error) {
      this.failed(turn, text, error);
    } finally {
      turn.stopLive();
      this.element.classList.remove("answering");
      this.answering = null;
      this.changed(this, { ended: true });
    }
  }

  // The session that is meant.
  get target() {
    if (this.id) return { session_id: this.id };
    if (this.parent) return { fork_of: this.parent };
    return systemPrompt() ? { system: systemPrompt() } : {};
  }

  async readAnswer(turn, said) {
    const { answering, history } = this;
    const asked = [...history, said];
    const message = history.length ? { messages: asked } : { message: said.content };
    const body = { ...message, ...this.target, ...sampling(), stream: true };
    const headers = { "Idempotency-Key": this.retry.key };
    const response = await request("POST", "/chat", { body, headers, signal: answering.abort.signal });
    let result = null;
    for await (const event of events(response)) {
      if (!answering.sessionId) {
        answering.sessionId = event.session_id;
        if (answering.stopped) this.stop();
      }
      if (event.usage) result = event;
      else if (event.delta) turn.hear(event.delta);
    }
    if (!result) throw new ApiError("the answer had no end", { code: "cut_off" });
    if (result.turn === null) throw new DOMException("stopped before anything was said", "AbortError");
    if (body.system) {
      this.system = { role: "system", content: body.system };
      this.turns.prepend(el("li", {}, systemOf(this.system)));
    }
    this.id = result.session_id;
    this.parent = null;
    this.history = [];
    const stored = { ...result, messages: [...asked, result.message] };
    this.stored.push(stored);
    this.finish(turn, stored);
    this.changed(this); // names the session in the address, so that loading the page again shows this answer
    await this.markPersonal();
    const rate = decodeRate(result.usage, result.timings);
    const speed = rate ? ` ${count(rate)} tokens per second.` : "";
    announce(`Answer complete. ${inWords(tokensBySource(result.usage))}.${speed}`);
  }

  // A person talks in it. A hint for lists; it may get lost, and comes again with the next turn.
  async markPersonal() {
    if (this.isPersonal) return;
    try {
      await request("POST", `/sessions/${this.id}/label`, { body: { personal: true }, quiet: true });
      this.isPersonal = true;
    } catch {
      // the answer is there
    }
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

// The text of a turn's question, or null where it cannot be said again as it was: tools are not the page's.
function questionIn({ messages }) {
  const question = messages.at(-2);
  const hasTools = messages.some(({ role, tool_calls: calls }) => role === "tool" || calls);
  return question?.role === "user" && !hasTools ? textOf(question) : null;
}

// What a version of this turn begins with; see `Conversation`.
export function beforeTurn(conversation, stored) {
  const { id, stored: turns, system, isPersonal } = conversation;
  return {
    parent: { session_id: id, turn: stored.turn - 1 },
    history: stored.messages.slice(0, -2),
    stored: turns.slice(0, turns.indexOf(stored)),
    system,
    personal: isPersonal,
  };
}

// A session with all of its turns, and of their messages those that edits have left; the service gives them in pages.
async function wholeSession(id) {
  const session = await getJson(`/sessions/${id}?limit=${TURNS_PAGE}`);
  for (let page = session; page.has_more && page.turns_data.length; ) {
    page = await getJson(`/sessions/${id}?limit=${TURNS_PAGE}&turns_after=${page.turns_data.at(-1).turn}`);
    session.turns_data.push(...page.turns_data);
    session.messages.push(...page.messages);
  }
  for (const turn of session.turns_data) {
    const left = session.messages.filter(({ id }) => parseInt(id) === turn.turn);
    turn.messages = left.map(({ id, ...message }) => message);
  }
  return session;
}

function earlierElement({ asked, answer }) {
  const turn = new Turn(asked);
  turn.finishEarlier(answer);
  return turn.element;
}

function randomKey() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
