// The list of conversations: pages of it, choosing, pinning and deleting. Knows no turn and no message.

import { getJson, postJson, request } from "./api.js";
import { age, announce, button, byId, el, icon, plural, time } from "./dom.js";

const PAGE = 30;
const MOST = 100; // of one request; what lies further back is fetched again by "Show older"
const PIN_S = 24 * 3600;

export class SessionList {
  // open(id): one was chosen. deleted(id): one is gone. failed(error): a request failed.
  constructor({ open, deleted, failed }) {
    Object.assign(this, { open, deleted, failed, sessions: [], current: null, hasMore: false });
    byId("more-sessions").addEventListener("click", () => this.more());
    setInterval(() => this.render(), 60_000); // ages
  }

  // The newest ones again, as many as are shown. quiet: nobody asked for it, so nobody is asked for a key.
  async refresh({ quiet = false } = {}) {
    const limit = Math.min(MOST, Math.max(PAGE, this.sessions.length));
    await this.fetch(`/sessions?limit=${limit}`, [], quiet);
  }

  async more() {
    await this.fetch(`/sessions?limit=${PAGE}&after=${encodeURIComponent(this.cursor)}`, this.sessions);
  }

  async fetch(path, before, quiet = false) {
    try {
      const page = await getJson(path, { quiet });
      const known = new Set(before.map(({ id }) => id));
      this.sessions = [...before, ...page.data.filter(({ id }) => !known.has(id))];
      this.hasMore = page.has_more;
      this.cursor = page.last_id;
      this.render();
    } catch (error) {
      if (!quiet) this.failed(error);
    }
  }

  select(id) {
    this.reveal = id !== this.current;
    this.current = id;
    this.render();
  }

  render() {
    const focused = document.activeElement?.closest("#sessions [data-part]");
    const place = focused && [focused.closest("li").dataset.id, focused.dataset.part];
    byId("sessions").replaceChildren(...this.sessions.map((session) => this.row(session)));
    byId("no-sessions").hidden = this.sessions.length > 0;
    byId("more-sessions").hidden = !this.hasMore;
    const shown = this.reveal && byId("sessions").querySelector("li:has([aria-current])");
    if (shown) {
      this.reveal = false;
      shown.scrollIntoView({ block: "nearest" });
    }
    if (place) byId("sessions").querySelector(`[data-id="${CSS.escape(place[0])}"] [data-part="${place[1]}"]`)?.focus();
  }

  row(session) {
    const { id, title, turns, updated_at: updated, parent, pinned_until: end } = session;
    const name = title || "Untitled";
    const pinned = isPinned(session);
    const choose = { class: "choose", "data-part": "choose", "aria-current": id === this.current ? "true" : null };
    const pin = { class: "ghost act pin", "data-part": "pin", "aria-label": `Pin ${name}`, "aria-pressed": pinned + "" };
    const remove = { class: "ghost act", "data-part": "delete", "aria-label": `Delete ${name}`, title: "Delete" };
    pin.title = pinned ? `Pinned until ${time(end)}. Click to unpin.` : "Pin: keep its cache before others' for a day";
    return el("li", { class: pinned ? "pinned" : null, "data-id": id },
      button({ ...choose, onclick: () => this.open(id) },
        el("span", { class: "name" }, parent && icon("fork"), el("span", {}, name)),
        el("span", { class: "quiet" }, `${plural(turns, "turn")} · ${age(updated)}`)),
      button({ ...pin, onclick: () => this.pin(session) }, icon("pin")),
      button({ ...remove, onclick: () => this.remove(id, name) }, icon("trash")));
  }

  async pin(session) {
    const ttl = isPinned(session) ? 0 : PIN_S;
    try {
      const { pinned_until: end } = await postJson(`/sessions/${session.id}/pin`, { ttl });
      session.pinned_until = end;
      announce(end ? `Pinned until ${time(end)}.` : "No longer pinned.");
      this.render();
    } catch (error) {
      this.failed(error);
    }
  }

  async remove(id, name) {
    if (!(await confirmDeletion(name))) return;
    try {
      await request("DELETE", `/sessions/${id}`);
    } catch (error) {
      if (error.status !== 404) return this.failed(error); // 404: gone already
    }
    announce("Deleted.");
    this.sessions = this.sessions.filter((session) => session.id !== id);
    this.render();
    this.deleted(id);
  }
}

// The server says until when; its clock may differ from this one's by seconds.
const isPinned = ({ pinned_until: end }) => end !== null && end > Date.now() / 1000;

function confirmDeletion(name) {
  const dialog = byId("delete-dialog");
  byId("delete-name").textContent = name;
  dialog.returnValue = "";
  dialog.showModal();
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => resolve(dialog.returnValue === "delete"), { once: true });
  });
}
