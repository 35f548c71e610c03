// What a person has set: how the page looks, and what goes with each message. The browser keeps it, but for the system
// prompt, which is the conversation's; never a key.

import { answerOf, byId } from "./dom.js";

const PLACE = "kvstore-settings";
const NUMBERS = { temperature: "temperature", max_tokens: "max-tokens", seed: "seed" }; // field -> id of its input
let kept = read();
let system = "";

function read() {
  try {
    return JSON.parse(localStorage.getItem(PLACE)) ?? {};
  } catch {
    return {}; // nothing kept, or a browser that keeps nothing
  }
}

function save(changes) {
  kept = { ...kept, ...changes };
  try {
    localStorage.setItem(PLACE, JSON.stringify(kept));
  } catch {
    // then it holds until the page is closed
  }
}

export function showTheme() {
  document.documentElement.dataset.theme = kept.theme ?? "auto";
}

// The fields of a request that were set.
export function sampling() {
  const given = Object.keys(NUMBERS).filter((name) => Number.isFinite(kept[name]));
  return Object.fromEntries(given.map((name) => [name, kept[name]]));
}

// Of a new conversation; empty for none.
export const systemPrompt = () => system;

// The dialog. A conversation that has begun has its system prompt for good.
export async function openSettings(conversation) {
  const isBegun = Boolean(conversation.id ?? conversation.parent);
  byId("system").value = isBegun ? conversation.system?.content ?? "" : system;
  byId("system").readOnly = isBegun;
  byId("system-help").textContent = isBegun
    ? "Of this conversation, for good. Another one begins with New chat."
    : "What the model is told first, in the conversation that you begin next.";
  byId("theme").value = kept.theme ?? "auto";
  for (const [name, id] of Object.entries(NUMBERS)) byId(id).value = kept[name] ?? "";
  if ((await answerOf(byId("settings-dialog"))) !== "save") return;
  if (!isBegun) system = byId("system").value.trim();
  const numbers = Object.entries(NUMBERS).map(([name, id]) => [name, byId(id).value]);
  save({
    theme: byId("theme").value,
    ...Object.fromEntries(numbers.map(([name, value]) => [name, value === "" ? null : Number(value)])),
  });
  showTheme();
}
