// What an empty conversation shows: which model answers, and three messages to begin with.

import { button, count, el } from "./dom.js";

const BUILT_IN = "kvstore-builtin";
const ABOUT_BUILT_IN = "This is kvstore's built-in model: a few million parameters, made to try the server with. It remembers what "
  + "you tell it and answers small talk; it knows nothing else.";
const KEPT = "Come back to any conversation whenever you like. What it has already read is kept, from fast memory down to "
  + "disk, and the bar with each answer shows where it came from.";
const EXAMPLES_BUILT_IN = [
  "My dog is called Biscuit, and I live in Lisbon.",
  "My door code is 4719. Please remember it.",
  "Hello! How are you today?",
];
const EXAMPLES = [
  "Explain in three sentences what a KV cache is.",
  "Write a Python function that finds the longest common prefix of two lists.",
  "Help me plan a quiet weekend in Lisbon.",
];

// model: as /v1/models describes it, or {} as long as that is not known. send(text): one was chosen.
export function welcome(model, send) {
  const isBuiltIn = model.root === BUILT_IN;
  const about = isBuiltIn ? ABOUT_BUILT_IN : model.id && `You talk to ${model.id}.`;
  const window = model.max_model_len && ` Its window holds ${count(model.max_model_len)} tokens.`;
  const examples = isBuiltIn ? EXAMPLES_BUILT_IN : EXAMPLES;
  return el("div", { class: "empty" },
    el("h2", {}, "What would you like to talk about?"),
    about && el("p", { class: "about" }, about, window),
    model.id && el("ul", { class: "examples", "aria-label": "Examples" },
      ...examples.map((text) => el("li", {}, button({ class: "soft", onclick: () => send(text) }, text)))),
    el("p", { class: "quiet" }, KEPT));
}
