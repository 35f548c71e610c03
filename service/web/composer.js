// The message box: typing, sending, stopping, and the notice above it when something failed.
// Shows the current conversation's draft and problem; what they mean is the conversation's.

import { request } from "./api.js";
import { byId, button, el } from "./dom.js";

const PAUSE_MS = 350; // after the last key
const PREFETCH_EVERY_MS = 15_000;

export class Composer {
  // startNew(): what the button does when the conversation is gone.
  constructor({ startNew }) {
    this.box = byId("message");
    this.conversation = null;
    this.prefetched = new Map(); // session id -> when it was last announced
    this.timer = null;
    this.startNew = startNew;
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit(this.box.value);
    });
    byId("stop").addEventListener("click", () => this.conversation.stop());
    this.box.addEventListener("keydown", (event) => this.onKey(event));
    document.addEventListener("keydown", (event) => this.onEscape(event));
    this.box.addEventListener("input", () => this.onInput());
    window.addEventListener("resize", () => this.fit());
  }

  show(conversation) {
    if (this.conversation !== conversation) {
      this.conversation = conversation;
      this.box.value = conversation.draft;
      clearTimeout(this.timer);
    }
    this.render();
  }

  render() {
    const { isAnswering, answering, problem, loaded } = this.conversation;
    const stop = byId("stop");
    const hadFocus = document.activeElement === stop;
    stop.hidden = !isAnswering;
    stop.classList.toggle("pressed", Boolean(answering?.stopped));
    byId("send").hidden = isAnswering;
    byId("send").disabled = !loaded || !this.box.value.trim();
    if (hadFocus && !isAnswering) this.box.focus();
    this.renderNotice(problem);
    this.fit();
  }

  renderNotice(problem) {
    const notice = byId("notice");
    if (this.shown === problem) return;
    this.shown = problem;
    notice.hidden = !problem;
    if (!problem) return notice.replaceChildren();
    const retry = () => this.submit(this.box.value.trim() ? this.box.value : problem.text);
    const again = problem.again && button({ class: "soft", id: "retry", onclick: retry }, "Retry");
    notice.replaceChildren(
      el("div", {}, el("b", {}, problem.title), " ", el("span", {}, problem.detail)),
      el("div", { class: "actions" },
        problem.gone ? button({ class: "soft", onclick: () => this.startNew() }, "New chat") : again,
        button({ class: "ghost", onclick: () => this.dismiss() }, "Dismiss")));
  }

  write(text) {
    this.box.value = text;
    this.onInput();
    this.box.focus();
  }

  dismiss() {
    this.conversation.problem = null;
    this.render();
    this.box.focus();
  }

  onKey(event) {
    if (event.key === "ArrowUp" && !this.box.value) {
      event.preventDefault();
      this.conversation.editLast();
    }
    // While an input method is composing, Enter chooses a word; it does not send.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
    event.preventDefault();
    this.submit(this.box.value);
  }

  // Stops the answer, where its button is seen and Escape closes nothing else.
  onEscape(event) {
    if (event.key !== "Escape" || event.repeat || event.isComposing) return;
    if (byId("stop").offsetParent && !document.querySelector("dialog[open], body.drawer")) this.conversation.stop();
  }

  onInput() {
    this.conversation.draft = this.box.value;
    this.render();
    clearTimeout(this.timer);
    if (this.box.value.trim()) this.timer = setTimeout(() => this.prefetch(), PAUSE_MS);
  }

  // The person is typing: what the conversation needs may be brought nearer. A hint; it may get lost.
  prefetch() {
    const { id, isAnswering } = this.conversation;
    const now = performance.now();
    if (!id || isAnswering || now - (this.prefetched.get(id) ?? -Infinity) < PREFETCH_EVERY_MS) return;
    this.prefetched.set(id, now);
    request("POST", `/sessions/${id}/prefetch`, { body: {}, quiet: true }).catch(() => {});
  }

  async submit(text) {
    const { conversation } = this;
    if (!text.trim() || conversation.isAnswering || !conversation.loaded) return;
    clearTimeout(this.timer);
    conversation.draft = "";
    this.box.value = "";
    const sending = conversation.send(text);
    this.render();
    await sending;
    const failed = conversation.problem?.text;
    if (failed == null) return;
    conversation.draft = conversation.draft.trim() ? `${failed}\n${conversation.draft}` : failed;
    if (this.conversation === conversation) {
      this.box.value = conversation.draft;
      this.render();
    }
  }

  // As tall as the text, up to the limit of the style sheet.
  fit() {
    this.box.style.height = "auto";
    this.box.style.height = `${this.box.scrollHeight}px`;
  }
}
