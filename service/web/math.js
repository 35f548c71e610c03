// Formulas in Markdown: where they begin and end, and KaTeX, which draws them. What it cannot read stays as it was written.

import { el, escaped } from "./dom.js";
import "./vendor/katex.js"; // leaves its name in `window`

const BLOCK = /^(?:\$\$[\s\S]+?\$\$|\\\[[\s\S]+?\\\])[ \t]*(?:\n|$)/;
// A dollar is a formula's where no space follows the first, none precedes the last, and no digit follows that: "$5 and $6".
const WITHIN = /^(?:\$\$[^$]+?\$\$|\$(?![\s$])(?:\\.|[^\\$\n])*?(?<!\s)\$(?!\d)|\\\([\s\S]+?\\\)|\\\[[\s\S]+?\\\])/;
const LIMITS = { trust: false, strict: "ignore", maxExpand: 500, maxSize: 20 };

const formula = (name, level, pattern, start) => ({
  name,
  level,
  start: (text) => (start.test(text) ? text.search(start) : undefined),
  tokenizer(text) {
    const raw = pattern.exec(text)?.[0];
    return raw && { type: name, raw, text: raw.trim() };
  },
  renderer: ({ text }) => {
    const code = `<code class="formula">${escaped(text)}</code>`;
    return level === "block" ? `<p>${code}</p>` : code;
  },
});

// For the parser: it leaves <code class="formula">, with the source as text.
export const formulas = {
  extensions: [
    formula("formulaBlock", "block", BLOCK, /\n(?:\$\$|\\\[)/),
    formula("formula", "inline", WITHIN, /\$|\\[([]/),
  ],
};

export function draw(fragment) {
  for (const code of fragment.querySelectorAll("code.formula")) {
    const source = code.textContent;
    const width = source.startsWith("$") && !source.startsWith("$$") ? 1 : 2; // of a delimiter
    const displayMode = /^(?:\$\$|\\\[)/.test(source);
    const shown = el("span", { class: displayMode ? "formula wide" : "formula" });
    try {
      window.katex.render(source.slice(width, -width), shown, { ...LIMITS, displayMode });
      code.replaceWith(shown);
    } catch {
      code.replaceWith(source);
    }
  }
}
