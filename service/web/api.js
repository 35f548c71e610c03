// The page's way to the service: requests with the key, errors in plain words, server-sent events. Knows no element.
// The key lives in this module's memory and nowhere else: not in storage, not in a cookie, not in the address.

let key = null;
let asking = null; // the promise of the key form, while it is open
let askForKey = async () => null;

// ask(wrong): shows the form and resolves with what was typed, or null when the person declined.
export function onKeyNeeded(ask) {
  askForKey = ask;
}

export class ApiError extends Error {
  constructor(message, { status = 0, code = null, retryAfter = null, shouldRetry = true } = {}) {
    super(message);
    Object.assign(this, { status, code, retryAfter, shouldRetry });
  }
}

// One request. Raises ApiError for an answer that is not 2xx, and for no answer at all (status 0).
export async function request(method, path, { body, signal, headers = {}, quiet = false } = {}) {
  for (;;) {
    const used = key;
    const response = await attempt(method, path, { body, signal, headers });
    if (response.ok) return response;
    const error = await errorOf(response);
    if (error.status !== 401 || quiet) throw error;
    if (key !== used) continue; // another request has asked meanwhile
    asking ??= askForKey(used !== null).finally(() => (asking = null));
    const typed = await asking;
    if (!typed) throw error;
    key = typed;
  }
}

async function attempt(method, path, { body, signal, headers }) {
  const all = { ...headers };
  if (body !== undefined) all["Content-Type"] = "application/json";
  if (key !== null) all.Authorization = `Bearer ${key}`;
  const text = body === undefined ? undefined : JSON.stringify(body);
  try {
    return await fetch(path, { method, headers: all, body: text, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the server cannot be reached", { code: "unreachable" });
  }
}

export async function getJson(path, options) {
  return (await request("GET", path, options)).json();
}

export async function postJson(path, body, options) {
  return (await request("POST", path, { body, ...options })).json();
}

async function errorOf(response) {
  const { status } = response;
  const retryAfter = Number(response.headers.get("retry-after")) || null;
  let error = null;
  try {
    ({ error } = await response.json());
  } catch {
    // not ours: a proxy's page, or nothing
  }
  const message = error?.message ?? `the server answered with status ${status}`;
  const shouldRetry = response.headers.get("x-should-retry") !== "false";
  return new ApiError(message, { status, code: error?.code, retryAfter, shouldRetry });
}

// The events of a streamed answer, parsed. An error event, and an end without [DONE], raise ApiError.
// Bytes arrive cut anywhere: inside a character (the decoder keeps the rest) and inside a line (the buffer does).
export async function* events(response) {
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let buffer = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await read(reader);
      buffer += done ? decoder.decode() : decoder.decode(value, { stream: true });
      const lines = buffer.split("\n");
      buffer = lines.pop();
      for (const line of lines.map((text) => text.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
        if (line !== "" || data.length === 0) continue;
        const text = data.join("\n");
        data = [];
        if (text === "[DONE]") return;
        yield parsed(text);
      }
      if (done) throw new ApiError("the connection ended in the middle of the answer", { code: "cut_off" });
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("the connection was lost in the middle of the answer", { code: "cut_off" });
  }
}

function parsed(text) {
  let event;
  try {
    event = JSON.parse(text);
  } catch {
    throw new ApiError("the server sent something that is not JSON", { code: "bad_event" });
  }
  if (event.error) throw streamError(event.error);
  return event;
}

// What became an event, since the answer had begun, has no status any more.
function streamError({ message, type, code }) {
  const refused = type === "invalid_request_error" ? 400 : 0;
  return new ApiError(message, { status: { session_not_found: 404, session_busy: 409 }[code] ?? refused, code });
}

// Whether the same request may have an answer when it is sent once more.
export function mayPass({ status, code, shouldRetry }) {
  if (code === "session_busy") return true; // once the other answer is complete
  if (status >= 400 && status < 500) return [401, 408, 429].includes(status);
  return shouldRetry !== false;
}

// What happened and what to do, for people: {title, detail}.
export function inPlainWords(error) {
  const { status, code, retryAfter } = error;
  const detail = error instanceof ApiError ? sentence(error.message) : "";
  const wait = retryAfter ? `Try again in ${retryAfter} s.` : "Try again in a moment.";
  const say = (title, what = detail) => ({ title, detail: what });
  if (code === "unreachable") return say("The server cannot be reached.", "Is it still running? Your message is kept.");
  if (code === "cut_off") return say("The connection broke before the answer was complete.", "Your message is kept.");
  if (status === 401) return say("The server needs an API key.", "Try again to enter one.");
  if (["host_not_allowed", "origin_not_allowed"].includes(code)) return say("The server does not know this address.");
  if (status === 403) return say("This key may not do that.");
  if (status === 404) return say("This conversation no longer exists.", "It was deleted or has expired.");
  if (code === "session_busy") {
    return say("This conversation is answering somewhere else.", "Try again when that answer is complete.");
  }
  if (code === "session_damaged") return say("This conversation is damaged.");
  if (status === 413) return say("The message is too long for this server.");
  if (!mayPass(error)) return say(status < 500 ? "The server refused the message." : "The answer failed.");
  if (status === 429) return say("Too many requests with this key.", wait);
  if (status === 503) return say("The server has all it can take.", `${detail} ${wait}`);
  return say("The answer failed.");
}

function sentence(text) {
  const whole = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(whole) ? whole : `${whole}.`;
}
