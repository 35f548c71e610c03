// The elements of one exchange: what was said to the model, its answer, what stands below and beside it.
// Knows no service and no conversation.

import { meter } from "./bar.js";
import { copyButton, count, el, plural } from "./dom.js";
import { LiveMarkdown } from "./markdown.js";

const ENDINGS = { length: "The answer stops here: it reached the token limit.", abort: "You stopped this answer." };

// A message's content is a string, or a list of parts of which only the text counts here.
export function textOf(message) {
  const { content } = message;
  if (Array.isArray(content)) return content.map((part) => part.text ?? "").join("");
  return content ?? "";
}

// The messages of one stored turn as [{asked, answer}]: several where a history was brought along.
export function exchangesOf(messages) {
  const found = [{ asked: [], answer: null }];
  for (const message of messages) {
    if (found.at(-1).answer) found.push({ asked: [], answer: null });
    if (message.role === "assistant") found.at(-1).answer = message;
    else found.at(-1).asked.push(message);
  }
  return found;
}

export function systemOf(message) {
  return el("div", { class: "system" }, el("span", { class: "who" }, "System prompt"), textOf(message));
}

function questionOf(message) {
  if (message.role === "system") return systemOf(message);
  const you = el("span", { class: "unseen" }, "You: ");
  return el("div", { class: "question" }, you, el("div", { class: "text" }, textOf(message)));
}

export function dividerOf(tokens) {
  const words = `${plural(tokens, "token")} of the oldest turns ${tokens === 1 ? "is" : "are"} no longer in the window`;
  return el("p", { class: "divider" }, el("span", {}, words));
}

export class Turn {
  // asked: messages. drawn(): more of the answer is to be seen.
  constructor(asked, drawn) {
    this.said = el("div", { class: "text" });
    this.markdown = new LiveMarkdown(this.said, drawn);
    this.below = el("div", { class: "below-answer" });
    this.answer = el("div", { class: "answer" }, el("span", { class: "unseen" }, "Answer: "), this.said, this.below);
    this.beside = el("div", { class: "beside" });
    this.asked = el("div", { class: "asked" }, ...asked.map(questionOf));
    this.element = el("li", { class: "turn" }, asked.length > 0 && this.asked, this.answer, this.beside);
    this.live = null;
  }

  get text() {
    return this.markdown.source;
  }

  startLive() {
    const live = (this.live = { start: performance.now(), first: null, pieces: 0 });
    const status = el("p", { class: "live-status" });
    const show = () => (status.textContent = liveWords(live));
    this.element.classList.add("live");
    this.answer.setAttribute("aria-busy", "true");
    this.beside.replaceChildren(status);
    show();
    live.timer = setInterval(show, 250);
  }

  hear(piece) {
    this.live.first ??= performance.now();
    this.live.pieces += 1;
    this.markdown.add(piece);
  }

  stopLive() {
    clearInterval(this.live.timer);
    this.element.classList.remove("live");
    this.answer.removeAttribute("aria-busy");
  }

  // An answer of a history that was brought along: this server did not give it.
  finishEarlier(text) {
    this.markdown.set(text);
    this.below.replaceChildren(el("div", { class: "tools" }, copyButton(() => text)));
    this.beside.replaceChildren(el("p", { class: "quiet" }, "Part of an imported history"));
  }

  // The complete answer. result: of a stored turn or a stream's last event; tools: buttons beside "Copy".
  finish(text, result, ...tools) {
    this.markdown.set(text); // the complete text is the one that counts
    if (result.truncated_tokens > 0) this.element.prepend(dividerOf(result.truncated_tokens));
    const ending = ENDINGS[result.finish_reason];
    this.below.replaceChildren(
      ...(ending ? [el("p", { class: "ending" }, ending)] : []),
      el("div", { class: "tools" }, copyButton(() => text), ...tools));
    this.beside.replaceChildren(result.usage?.prompt_tokens ? meter(result) : "");
  }

  // What was said before it broke off.
  fail() {
    this.markdown.set(this.text);
    this.element.classList.add("failed");
    this.below.replaceChildren(el("p", { class: "ending" }, "Incomplete, and not stored."));
    this.beside.replaceChildren();
  }
}

function liveWords({ start, first, pieces }) {
  const now = performance.now();
  if (first === null) return now - start < 1500 ? "Reading…" : `Reading… ${Math.round((now - start) / 1000)} s`;
  const rate = now - first > 400 ? (pieces - 1) / ((now - first) / 1000) : 0;
  return rate > 0 ? `${rate < 10 ? rate.toFixed(1) : count(rate)} tokens/s` : "Answering…";
}
