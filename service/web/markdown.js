// Answers' Markdown as elements: a parser that makes no HTML of a model's HTML, and a sanitiser behind it that lets
// through what is named here and nothing else. Code gets its colours, and formulas their form. Knows no conversation.

import { copyButton, el, escaped } from "./dom.js";
import { draw, formulas } from "./math.js";
import highlighter from "./vendor/highlight.js";
import { Marked } from "./vendor/marked.js";
import createSanitiser from "./vendor/purify.js";

const TAGS = [
  "a", "b", "blockquote", "br", "code", "del", "em", "h3", "h4", "h5", "h6", "hr", "li", "ol", "p", "pre", "strong",
  "table", "tbody", "td", "th", "thead", "tr", "ul",
];
const ADDRESS = /^(?:https?:\/\/|mailto:)/i;
const LANGUAGE = /^(?:language-[\w+#.-]{1,30}|formula)$/;
const COLOUR = /^[a-z_ -]{1,80}$/;
const MOST_COLOURED = 50_000; // characters; colours of more would take too long
const SHARE = 5; // drawing takes one part in so many of the time: a long block is drawn less often
// A last line that may still become anything: a list, a rule, a fence, or a heading of the line before.
const UNDECIDED = /(?:^|\n)[-=*_+~`#|:> \t]*(?:\d{1,9}[.)]?[ \t]*)?$/;

const nothing = () => undefined;

const marked = new Marked({
  gfm: true,
  breaks: true,
  tokenizer: { html: nothing, tag: nothing }, // what looks like HTML is text
  renderer: {
    heading({ tokens, depth }) { // the page has headings of its own above these
      const tag = `h${Math.min(6, depth + 2)}`;
      return `<${tag}>${this.parser.parseInline(tokens)}</${tag}>`;
    },
    // Nothing is fetched because a model said so.
    image: ({ href, text }) => `<a href="${escaped(href)}">${escaped(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

marked.use(formulas);

const sanitiser = createSanitiser(window);
sanitiser.addHook("uponSanitizeAttribute", (element, attribute) => {
  const { attrName: name, attrValue: value } = attribute;
  if (name === "href") attribute.keepAttr = ADDRESS.test(value);
  if (name === "class") attribute.keepAttr = { CODE: LANGUAGE, SPAN: COLOUR }[element.tagName]?.test(value) ?? false;
});
sanitiser.addHook("afterSanitizeAttributes", (element) => {
  if (element.tagName !== "A" || !element.hasAttribute("href")) return;
  element.setAttribute("target", "_blank");
  element.setAttribute("rel", "noopener noreferrer nofollow");
});

function sanitised(html, tags = TAGS) {
  return sanitiser.sanitize(html, {
    ALLOWED_TAGS: tags,
    ALLOWED_ATTR: ["href", "title", "align", "start", "class"],
    ADD_URI_SAFE_ATTR: ["align", "start"],
    ALLOWED_URI_REGEXP: ADDRESS,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
}

// Code in a frame with its language and a button; a table that scrolls by itself where it is too wide.
function framed(fragment, isColoured) {
  for (const pre of fragment.querySelectorAll("pre")) {
    const code = pre.querySelector("code") ?? pre;
    const language = code.className.replace("language-", "");
    if (isColoured && language) colour(code, language);
    const frame = el("div", { class: "code" },
      el("div", { class: "code-head" }, el("span", {}, language), copyButton(() => code.textContent)));
    pre.tabIndex = 0; // what scrolls is reached with the keyboard
    pre.replaceWith(frame);
    frame.append(pre);
  }
  for (const table of fragment.querySelectorAll("table")) {
    const frame = el("div", { class: "table", tabindex: "0" });
    table.replaceWith(frame);
    frame.append(table);
  }
  return fragment;
}

function colour(code, language) {
  const text = code.textContent;
  if (text.length > MOST_COLOURED || !highlighter.getLanguage(language)) return;
  code.replaceChildren(sanitised(highlighter.highlight(text, { language, ignoreIllegals: true }).value, ["span"]));
}

// isLast: more of it may come, so its code has no colours yet.
function elementsOf(tokens, isLast = false) {
  const fragment = sanitised(marked.parser(tokens));
  draw(fragment);
  return [...framed(fragment, !isLast).childNodes];
}

// Fresh nodes in place of old ones, the last of their parent; what is the same stays, with what is selected in it.
function exchange(parent, old, fresh) {
  const shown = fresh.map((node, place) => {
    const before = old[place];
    if (before?.isEqualNode(node)) return before;
    before ? before.replaceWith(node) : parent.append(node);
    return node;
  });
  for (const node of old.slice(fresh.length)) node.remove();
  return shown;
}

// A text that is shown while it comes. drawn(): more of it is to be seen.
// Blocks before the last one are done and stay as they are; only the last one is drawn again, once a frame at most.
export class LiveMarkdown {
  constructor(element, drawn = () => {}) {
    Object.assign(this, { element, drawn, source: "", complete: false, waiting: false, cost: 0, ended: 0 });
    this.numDone = 0; // characters of the blocks that are done
    this.block = null; // the last one's token
    this.nodes = []; // and its elements
  }

  add(piece) {
    this.source += piece.replaceAll("\r", "");
    if (this.waiting) return;
    this.waiting = true;
    const wait = this.ended + SHARE * this.cost - performance.now();
    setTimeout(() => requestAnimationFrame(() => this.draw()), Math.max(0, wait));
  }

  // The whole text, which does not change any more.
  set(text) {
    this.complete = true;
    this.source = text;
    exchange(this.element, [...this.element.childNodes], elementsOf(marked.lexer(text)));
  }

  draw() {
    if (this.complete) return;
    const begun = performance.now();
    this.waiting = false;
    const tokens = marked.lexer(this.source.slice(this.numDone).replace(UNDECIDED, ""));
    const place = tokens.findLastIndex(({ type }) => type !== "space");
    if (place > 0) this.finish(tokens.slice(0, place));
    if (place >= 0) this.showBlock(tokens[place]);
    this.ended = performance.now();
    this.cost = this.ended - begun;
    this.drawn();
  }

  finish(tokens) {
    exchange(this.element, this.nodes, elementsOf(tokens));
    for (const { raw } of tokens) this.numDone += raw.length;
    this.nodes = [];
    this.block = null;
  }

  // Code that goes on keeps its frame, and with it where it was scrolled to.
  showBlock(token) {
    const goesOn = token.type === "code" && this.block?.type === "code" && token.lang === this.block.lang;
    const code = goesOn && this.nodes[0].querySelector("code").firstChild;
    if (code) code.data = `${token.text.replace(/\n$/, "")}\n`; // as the parser ends it
    else this.nodes = exchange(this.element, this.nodes, elementsOf([token], true));
    this.block = token;
  }
}

export function showMarkdown(element, text) {
  new LiveMarkdown(element).set(text);
}
