// Conversations as files: JSON with a title and messages, which other programs read and write, too.

import { postJson } from "./api.js";
import { el } from "./dom.js";

export function exportConversation({ system, stored }, title) {
  const messages = [...(system ? [system] : []), ...stored.flatMap((turn) => turn.messages)];
  const text = JSON.stringify({ title, messages }, null, 2);
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: url, download: `${title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 60) || "conversation"}.json` }).click();
  URL.revokeObjectURL(url);
}

// Gives the new session, and the text of a last message that has no answer yet.
// Raises ApiError, and Error for a file that is none of ours.
export async function importConversation(file) {
  const { title, messages } = parsed(await file.text());
  const end = messages.findLastIndex(({ role }) => role === "assistant") + 1;
  if (!end) throw new Error("There is no answer in it.");
  const body = { messages: messages.slice(0, end), personal: true };
  const session = await postJson("/sessions", title ? { ...body, title: title.slice(0, 200) } : body);
  const draft = messages.slice(end).map(({ content }) => content).filter((content) => typeof content === "string");
  return { session, draft: draft.join("\n") };
}

// A list of messages, or an object that has one.
function parsed(text) {
  let content;
  try {
    content = JSON.parse(text);
  } catch {
    throw new Error("It is not JSON.");
  }
  const messages = Array.isArray(content) ? content : content?.messages;
  if (!Array.isArray(messages) || !messages.every((message) => typeof message?.role === "string")) {
    throw new Error("It has no list of messages.");
  }
  return { title: typeof content.title === "string" ? content.title : "", messages };
}
