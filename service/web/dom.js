// Small tools of the page: making elements whose text is only ever text, and writing numbers. Knows no service.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

// An element. Strings among the children become text nodes, so that nothing of a model or a person is ever markup.
export function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value != null) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child != null && child !== false));
  return element;
}

// Text with the five signs that mean something in HTML written as numbers.
export const escaped = (text) => text.replace(/[&<>"']/g, (character) => `&#${character.charCodeAt(0)};`);

export const button = (attributes, ...children) => el("button", { type: "button", ...attributes }, ...children);

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

export const icon = (name) => svg("svg", { "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));

// textOf(): what is copied, when it is pressed.
export const copyButton = (textOf) =>
  button({ class: "ghost small", onclick: (event) => copy(textOf(), event.currentTarget.lastChild) },
    icon("copy"), "Copy");

// shown: the button's text, which says for a moment how it went.
async function copy(text, shown) {
  try {
    await navigator.clipboard.writeText(text);
    shown.data = "Copied";
  } catch {
    shown.data = "Not allowed by the browser"; // as on pages that do not come over HTTPS
  }
  announce(shown.data);
  setTimeout(() => (shown.data = "Copy"), 2000);
}

// What was pressed in a dialog, by the value of its button; "" when it was closed otherwise.
export function answerOf(dialog) {
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue), { once: true });
  });
}

// What a screen reader says without the focus moving.
export function announce(text) {
  byId("announcer").textContent = text;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const count = (number) => whole.format(number);
export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

// Three significant figures at most: 1.25, 12.5, 125.
function figures(number) {
  return number >= 99.95 ? count(number) : String(Number(number.toPrecision(3)));
}

export function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  for (; number >= 999.5 && unit < units.length - 1; unit++) number /= 1024;
  return `${figures(number)} ${units[unit]}`;
}

export function duration(seconds) {
  if (seconds == null) return "–";
  if (seconds < 0.00095) return "<1 ms";
  if (seconds < 0.9995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 59.95) return `${figures(seconds)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

// A part that is not all of it never reads 100 %, and one that is something never 0 %.
export function percent(part, all) {
  if (!all) return "–";
  const value = Math.round((100 * part) / all);
  if (value >= 100 && part < all) return ">99 %";
  if (value <= 0 && part > 0) return "<1 %";
  return `${value} %`;
}

export function age(unixSeconds, now = Date.now() / 1000) {
  const seconds = Math.max(0, now - unixSeconds);
  if (seconds < 60) return "just now";
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ago`;
  if (seconds < 86400) return `${Math.floor(seconds / 3600)} h ago`;
  const days = Math.floor(seconds / 86400);
  if (days < 7) return days === 1 ? "yesterday" : `${days} days ago`;
  const parts = { year: "numeric", month: "short", day: "numeric" };
  return new Date(unixSeconds * 1000).toLocaleDateString(undefined, parts);
}

// Such as "Tue 14:05".
export function time(unixSeconds) {
  const parts = { weekday: "short", hour: "2-digit", minute: "2-digit" };
  return new Date(unixSeconds * 1000).toLocaleString(undefined, parts);
}
