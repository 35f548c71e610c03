// The elements of one exchange: what was said to the model, its answer, what stands below and beside it.
// Knows no service and no conversation.

import { meter } from "./bar.js";
import { button, copyButton, count, el, icon, plural } from "./dom.js";
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
  if (message.role === "tool") return card("Result", message.tool_call_id, textOf(message));
  const you = el("span", { class: "unseen" }, "You: ");
  return el("div", { class: "question" }, you, el("div", { class: "text" }, textOf(message)));
}

// What a program sees of a tool, folded.
function card(what, name, text) {
  return el("details", { class: "card-of-tool" },
    el("summary", {}, `${what} `, el("code", {}, name ?? "")), el("pre", { tabindex: "0" }, el("code", {}, indented(text))));
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

const callOf = ({ function: called }) => card("Calls", called.name, called.arguments);

export function dividerOf(tokens) {
  const words = `${plural(tokens, "token")} of the oldest turns ${tokens === 1 ? "is" : "are"} no longer in the window`;
  return el("p", { class: "divider" }, el("span", {}, words));
}

export class Turn {
  // asked: messages. drawn(): more of the answer is to be seen.
  constructor(asked, drawn = () => {}) {
    this.drawn = drawn;
    this.said = el("div", { class: "text" });
    this.markdown = new LiveMarkdown(this.said, drawn);
    this.thought = el("div", { class: "thought" });
    this.thinking = el("details", { class: "thinking", hidden: true }, el("summary", {}, "Thinking"), this.thought);
    this.calls = el("div", { class: "calls" });
    this.below = el("div", { class: "below-answer" });
    this.answer = el("div", { class: "answer" }, el("span", { class: "unseen" }, "Answer: "),
      this.thinking, this.said, this.calls, this.below);
    this.beside = el("div", { class: "beside" });
    this.tools = el("div", { class: "tools" }); // of the question
    this.asked = el("div", { class: "asked" }, ...asked.map(questionOf), this.tools);
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

  // delta: of an event.
  hear({ content, reasoning_content: thought, tool_calls: calls }) {
    this.live.first ??= performance.now();
    this.live.pieces += 1;
    if (content) this.markdown.add(content);
    if (thought) {
      this.thinking.hidden = false;
      this.thought.append(thought);
    }
    if (calls) this.calls.append(...calls.map(callOf));
    if (thought || calls) this.drawn();
  }

  stopLive() {
    clearInterval(this.live.timer);
    this.element.classList.remove("live");
    this.answer.removeAttribute("aria-busy");
  }

  // message: the complete answer, which is the one that counts.
  show(message) {
    const { reasoning_content: thought, tool_calls: calls } = message;
    this.markdown.set(textOf(message));
    this.thinking.hidden = !thought;
    this.thought.textContent = thought ?? "";
    this.calls.replaceChildren(...(calls ?? []).map(callOf));
  }

  // An answer of a history that was brought along: this server did not give it.
  finishEarlier(message, ...tools) {
    this.show(message);
    this.below.replaceChildren(el("div", { class: "tools" }, copyButton(() => textOf(message)), ...tools));
    this.beside.replaceChildren(el("p", { class: "quiet" }, "Part of an imported history"));
  }

  // result: of a stored turn or a stream's last event; tools: buttons beside "Copy".
  finish(message, result, ...tools) {
    this.finishEarlier(message, ...tools);
    if (result.truncated_tokens > 0) this.element.prepend(dividerOf(result.truncated_tokens));
    const ending = ENDINGS[result.finish_reason];
    if (ending) this.below.prepend(el("p", { class: "ending" }, ending));
    if (result.usage?.prompt_tokens) this.beside.replaceChildren(meter(result));
  }

  // What was said before it broke off.
  fail() {
    this.markdown.set(this.text);
    this.element.classList.add("failed");
    this.below.replaceChildren(el("p", { class: "ending" }, "Incomplete, and not stored."));
    this.beside.replaceChildren();
  }

  // versions: [{id, isShown}], of this turn. open(id): another one is wanted. edit(): the question is, changed.
  offer(versions, open, edit) {
    const place = versions.findIndex(({ isShown }) => isShown);
    const step = (by, label, name) => button(
      { class: "ghost small", "aria-label": label, title: label, disabled: !versions[place + by],
        onclick: () => open(versions[place + by].id) },
      icon(name));
    const choice = versions.length > 1 && el("span", { class: "versions", role: "group", "aria-label": "Versions" },
      step(-1, "Earlier version", "left"), el("span", {}, `${place + 1} / ${versions.length}`),
      step(1, "Later version", "right"));
    this.tools.replaceChildren(...[
      choice, edit && button({ class: "ghost small edit", onclick: edit }, icon("edit"), "Edit"),
    ].filter(Boolean));
    this.tools.classList.toggle("always", Boolean(choice));
  }

  // The question as a box. send(text): it is to be said again.
  edit(text, send) {
    const bubble = [...this.asked.querySelectorAll(".question")].at(-1);
    const box = el("textarea", { "aria-label": "Edit your message", rows: Math.min(10, text.split("\n").length + 1) });
    const close = () => {
      form.replaceWith(bubble);
      this.tools.hidden = false;
      this.tools.querySelector(".edit")?.focus();
    };
    const submit = () => box.value.trim() && send(box.value);
    const form = el("form", { class: "edit-box", onsubmit: (event) => (event.preventDefault(), submit()) }, box,
      el("div", { class: "actions" }, button({ class: "soft small", onclick: close }, "Cancel"),
        el("button", { class: "primary small", type: "submit" }, "Send")));
    form.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Escape") close();
      if (event.key !== "Enter" || event.shiftKey || event.target !== box) return;
      event.preventDefault();
      submit();
    });
    box.value = text;
    bubble.replaceWith(form);
    this.tools.hidden = true;
    box.focus();
  }
}

function liveWords({ start, first, pieces }) {
  const now = performance.now();
  if (first === null) return now - start < 1500 ? "Reading…" : `Reading… ${Math.round((now - start) / 1000)} s`;
  const rate = now - first > 400 ? (pieces - 1) / ((now - first) / 1000) : 0;
  return rate > 0 ? `${rate < 10 ? rate.toFixed(1) : count(rate)} tokens/s` : "Answering…";
}
