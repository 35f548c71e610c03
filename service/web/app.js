// Joins the parts of the page: which conversation and view are shown, the address's #id, the key form, the health.

import { getJson, inPlainWords, onKeyNeeded } from "./api.js";
import { legend } from "./bar.js";
import { Conversation, beforeTurn } from "./chat.js";
import { Composer } from "./composer.js";
import { answerOf, byId, count, plural } from "./dom.js";
import { SessionList } from "./sessions.js";
import { openSettings, showTheme } from "./settings.js";
import { Tiers } from "./tiers.js";
import { exportConversation, importConversation } from "./transfer.js";
import { welcome } from "./welcome.js";

const HEALTH_EVERY_MS = 10_000;
const RUNNING_EVERY_MS = 2000;
const NEAR_END = 48; // pixels from the end that still count as being there

const scroller = byId("scroller");
const phone = matchMedia("(max-width: 760px)");
const kept = new Set(); // conversations that are not shown, with what only this page has: an answer coming, a draft
let current = null;
let model = {}; // as /v1/models describes it
let follow = true; // the view stays at the end of the conversation; otherwise it is at `place`
let place = 0;

const composer = new Composer({ startNew });
const list = new SessionList({
  open,
  deleted: (ids) => ids.includes(current.id) && startNew(),
  changed: listed,
  failed: showProblem,
});
const tiers = new Tiers(byId("tiers-view"), { healthSeen: showHealth });

// -- which conversation ----------------------------------------------------------------------------------------------
function show(conversation) {
  if (current?.isAnswering || (current?.draft.trim() && !current.parent)) kept.add(current);
  kept.delete(conversation);
  current = conversation;
  byId("log").replaceChildren(conversation.element);
  composer.show(conversation);
  list.select(conversation.id ?? conversation.parent?.session_id);
  const hash = conversation.id ? `#${conversation.id}` : location.pathname;
  if (location.hash.slice(1) !== (conversation.id ?? "")) history.pushState(null, "", hash);
  showHeading();
  showView("chat");
  setDrawer(false);
  toEnd();
}

const make = (id, before) => new Conversation(id, {
  changed,
  forked,
  again,
  versionsOf: (conversation, turn) => {
    const session = conversation.id && list.find(conversation.id);
    return session ? list.versions.of(session, turn) : [];
  },
  open,
  welcome: showWelcome,
}, before);

const showWelcome = () => welcome(model, (text) => composer.submit(text));

function startNew() {
  const conversation = make(null);
  show(take(({ id, parent, isAnswering }) => !id && !parent && !isAnswering, conversation) ?? conversation);
  if (!phone.matches) byId("message").focus();
}

async function open(id) {
  if (current?.id === id && current.loaded) return show(current);
  const conversation = make(id);
  const unfinished = take(({ id: other, answering }) => (other ?? answering?.sessionId) === id, conversation);
  show(unfinished ?? conversation);
  if (!unfinished) await load(conversation);
}

async function load(conversation) {
  try {
    await conversation.load();
    if (conversation === current) toEnd();
    if (conversation.session.running) setTimeout(() => loadAgain(conversation), RUNNING_EVERY_MS);
  } catch (error) {
    conversation.problem = { ...inPlainWords(error), text: null, gone: error.status === 404 };
    if (conversation === current) composer.render();
  }
}

// It is being answered in another window, or was until just now.
function loadAgain(conversation) {
  if (conversation !== current || conversation.isAnswering) return;
  load(conversation).then(() => list.refresh({ quiet: true }));
}

// The kept one that fits, when it is answering or has failed. Of any other only the draft goes into the new one, which
// shows what the server knows by now.
function take(fits, conversation) {
  const found = [...kept].find(fits);
  kept.delete(found);
  if (found?.isAnswering || found?.problem) return found;
  conversation.draft = found?.draft ?? "";
  return null;
}

// Another version: a fork of what came before the turn, which the service makes with its first answer.
function again(conversation, stored, text) {
  const version = make(null, beforeTurn(conversation, stored));
  show(version);
  composer.submit(text);
}

function forked(session) {
  list.refresh();
  open(session.id);
}

function listed() {
  current.offer();
  if (follow) toEnd(); // a row of buttons has its height
}

// Something in a conversation, perhaps one that is not shown, has changed.
function changed(conversation, { sent, said, ended } = {}) {
  if (ended) afterAnswer(conversation);
  if (conversation !== current) return;
  const { id } = conversation;
  if (id && location.hash.slice(1) !== id) history.replaceState(null, "", `#${id}`);
  if (!said) {
    composer.render();
    showHeading();
  }
  if (sent) follow = true;
  if (follow) toEnd();
}

async function afterAnswer(conversation) {
  if (!conversation.problem && !conversation.draft.trim()) kept.delete(conversation);
  if (conversation === current && conversation.id) list.select(conversation.id);
  await list.refresh({ quiet: Boolean(conversation.problem) });
  if (conversation === current) showHeading();
}

function showHeading() {
  const session = list.find(current.id) ?? current.session;
  byId("title").textContent = session?.title || "New chat";
  document.title = session?.title ? `${session.title} · kvstore` : "kvstore";
  const parts = session ? [plural(session.turns, "turn")] : [];
  const limit = model.max_model_len ? ` of ${count(model.max_model_len)}` : "";
  if (session?.tokens) parts.push(`${count(session.tokens)}${limit} tokens in the window`);
  if (session?.parent && !session.parent.version) parts.push(`forked at turn ${session.parent.turn ?? session.turns}`);
  if (current.session?.running && !current.isAnswering) parts.push("answering in another window");
  byId("subtitle").textContent = parts.join(" · ");
}

function showProblem(error) {
  if (current.problem?.text) return; // a message that waits to be sent again is more important
  current.problem = { ...inPlainWords(error), text: null };
  composer.render();
}

// -- scrolling -------------------------------------------------------------------------------------------------------
const sizeNow = () => `${scroller.clientWidth} x ${scroller.clientHeight}`;
let size = "";

function toEnd() {
  scroller.scrollTop = scroller.scrollHeight;
  size = sizeNow();
  follow = true;
  byId("to-end").hidden = true;
}

scroller.addEventListener("scroll", () => {
  if (byId("chat-view").hidden) return;
  if (follow && size !== sizeNow()) return toEnd(); // the window's size moved it, not the person
  place = scroller.scrollTop;
  follow = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < NEAR_END;
  byId("to-end").hidden = follow;
});
byId("to-end").addEventListener("click", toEnd);
// A notice, a taller message box, a phone's keyboard, a narrower window: none of them leaves the end.
new ResizeObserver(() => follow && toEnd()).observe(scroller);

// -- views and the drawer --------------------------------------------------------------------------------------------
function showView(name) {
  byId("chat-view").hidden = name !== "chat";
  byId("tiers-view").hidden = name !== "tiers";
  byId("show-chat").setAttribute("aria-pressed", String(name === "chat"));
  byId("show-tiers").setAttribute("aria-pressed", String(name === "tiers"));
  tiers.setVisible(name === "tiers");
  if (name !== "chat") return;
  composer.fit(); // what is hidden has no height, and forgets where it was
  follow ? toEnd() : (scroller.scrollTop = place);
}

function setDrawer(isOpen) {
  document.body.classList.toggle("drawer", isOpen && phone.matches);
  byId("sidebar").inert = phone.matches && !isOpen;
  if (isOpen) byId("close-sidebar").focus();
}

byId("show-chat").addEventListener("click", () => showView("chat"));
byId("show-tiers").addEventListener("click", () => showView("tiers"));
byId("new-chat").addEventListener("click", startNew);
byId("open-sidebar").addEventListener("click", () => setDrawer(true));
for (const id of ["close-sidebar", "scrim"]) byId(id).addEventListener("click", () => setDrawer(false));
phone.addEventListener("change", () => setDrawer(false));
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !document.body.classList.contains("drawer")) return;
  setDrawer(false);
  byId("open-sidebar").focus();
});

// -- the menu, settings and keys -------------------------------------------------------------------------------------
function renameCurrent() {
  const session = list.find(current.id) ?? current.session;
  if (session) list.rename(session).then(showHeading);
}

async function importFile() {
  const [file] = byId("import-file").files;
  byId("import-file").value = ""; // the same file may be chosen again
  if (!file) return;
  try {
    const { session, draft } = await importConversation(file);
    await list.choose(true);
    await open(session.id);
    if (draft) composer.write(draft);
  } catch (error) {
    current.problem = { title: `${file.name} was not imported.`, detail: error.message, text: null };
    composer.render();
  }
}

function focusSearch() {
  setDrawer(true);
  byId("search").select();
  byId("search").focus();
}

const DEEDS = {
  "menu-rename": renameCurrent,
  "menu-export": () => exportConversation(current, byId("title").textContent),
  "menu-import": () => byId("import-file").click(),
  "menu-settings": () => openSettings(current),
  "menu-keys": () => answerOf(byId("keys-dialog")),
};
for (const [id, deed] of Object.entries(DEEDS)) {
  byId(id).addEventListener("click", () => {
    byId("menu").hidePopover();
    deed();
  });
}
byId("menu").addEventListener("beforetoggle", () => {
  byId("menu-rename").disabled = !(list.find(current.id) ?? current.session);
  byId("menu-export").disabled = !current.stored.length;
});
byId("import-file").addEventListener("change", importFile);
for (const button of document.querySelectorAll("dialog [data-close]")) {
  button.addEventListener("click", () => button.closest("dialog").close());
}

// With Ctrl, or Command: "shift" and a key, or the key alone.
const KEYS = { k: focusSearch, "shift o": startNew, ",": DEEDS["menu-settings"], "/": DEEDS["menu-keys"] };
document.addEventListener("keydown", (event) => {
  if (!(event.ctrlKey || event.metaKey) || event.altKey || document.querySelector("dialog[open]")) return;
  const deed = KEYS[`${event.shiftKey ? "shift " : ""}${event.key.toLowerCase()}`];
  if (!deed) return;
  event.preventDefault();
  deed();
});

// -- key and health --------------------------------------------------------------------------------------------------
onKeyNeeded((wrong) => new Promise((resolve) => {
  const dialog = byId("key-dialog");
  byId("key-problem").textContent = wrong ? "The server did not accept that key." : "";
  byId("key").value = "";
  let answer = null;
  byId("key-form").onsubmit = () => (answer = byId("key").value.trim() || null);
  dialog.onclose = () => {
    byId("key").value = "";
    resolve(answer);
  };
  dialog.showModal();
}));

function showHealth({ status, reasons }) {
  const words = { ok: model.id ?? "Ready", degraded: "Degraded: see Tiers", unreachable: "Cannot be reached" };
  const text = words[status] ?? status;
  byId("health").dataset.status = status;
  if (byId("health-text").textContent !== text) byId("health-text").textContent = text; // said once by a screen reader
  byId("health").title = (reasons ?? []).join("\n");
}

async function checkHealth() {
  if (document.hidden) return;
  showHealth(await tiers.fetchHealth());
}

// -- start -----------------------------------------------------------------------------------------------------------
function openHash() {
  const id = location.hash.slice(1);
  return /^[A-Za-z0-9_-]{1,128}$/.test(id) ? open(id) : startNew();
}

async function start() {
  showTheme();
  byId("legend").append(...legend());
  openHash();
  window.addEventListener("popstate", openHash); // back, forward, and an edited #id
  document.addEventListener("visibilitychange", () => {
    if (document.hidden) return;
    list.refresh({ quiet: true });
    checkHealth();
  });
  setInterval(checkHealth, HEALTH_EVERY_MS);
  try {
    const models = await getJson("/v1/models");
    model = models.data[0] ?? model;
    if (current.empty?.isConnected) current.show([], null);
  } catch (error) {
    showProblem(error);
  }
  checkHealth();
  await list.refresh();
  showHeading();
}

start();
