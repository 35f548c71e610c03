// The list of conversations, a person's and those of programs: finding, choosing, pinning, deleting. Versions of one
// conversation are one row. Knows no turn and no message.

import { getJson, postJson, request } from "./api.js";
import { age, announce, answerOf, button, byId, el, icon, plural, time } from "./dom.js";
import { Versions } from "./versions.js";

const PAGE = 30; // rows; "Show older" shows as many more
const MOST = 1000; // of one request
const NEWEST = 100; // of a refresh
const PIN_S = 24 * 3600;

const nothing = () => ({ sessions: [], hasMore: true, cursor: null });

export class SessionList {
  // open(id): one was chosen. deleted(ids): they are gone. changed(): what is known of sessions. failed(error): of a
  // request.
  constructor({ open, deleted, changed, failed }) {
    Object.assign(this, { open, deleted, changed, failed, current: null, isPersonal: true, numRows: PAGE });
    this.lists = { true: nothing(), false: nothing() }; // by whether they are a person's
    this.versions = new Versions([]); // among all of them
    byId("more-sessions").addEventListener("click", () => this.more());
    byId("search").addEventListener("input", () => this.render());
    for (const [id, isPersonal] of [["show-personal", true], ["show-programs", false]]) {
      byId(id).addEventListener("click", () => this.choose(isPersonal));
    }
    setInterval(() => this.render(), 60_000); // ages
  }

  get list() {
    return this.lists[this.isPersonal];
  }

  find(id) {
    return this.versions.byId.get(id);
  }

  // Called when the lists have changed.
  renew() {
    this.versions = new Versions(Object.values(this.lists).flatMap(({ sessions }) => sessions));
    this.render();
    this.changed();
  }

  choose(isPersonal) {
    this.isPersonal = isPersonal;
    this.numRows = PAGE;
    this.render();
    return this.refresh();
  }

  // The newest ones again. quiet: nobody asked for it, so nobody is asked for a key.
  async refresh({ quiet = false } = {}) {
    const { list } = this;
    const isFirst = list.cursor === null;
    const page = await this.fetch(`limit=${isFirst ? MOST : NEWEST}`, quiet);
    if (!page) return;
    const oldest = page.has_more ? page.data.at(-1).updated_at : Infinity;
    const known = new Set(page.data.map(({ id }) => id));
    const older = list.sessions.filter(({ id, updated_at: at }) => !known.has(id) && at <= oldest && page.has_more);
    list.sessions = [...page.data, ...older];
    if (isFirst || !page.has_more) Object.assign(list, { hasMore: page.has_more, cursor: page.last_id });
    this.renew();
  }

  async more() {
    const { list } = this;
    this.numRows += PAGE;
    if (this.rows.length < this.numRows && list.hasMore) {
      const page = await this.fetch(`limit=${MOST}&after=${encodeURIComponent(list.cursor)}`);
      if (!page) return;
      const known = new Set(list.sessions.map(({ id }) => id));
      list.sessions.push(...page.data.filter(({ id }) => !known.has(id)));
      Object.assign(list, { hasMore: page.has_more, cursor: page.last_id ?? list.cursor });
    }
    this.renew();
  }

  async fetch(query, quiet = false) {
    try {
      return await getJson(`/sessions?personal=${this.isPersonal}&${query}`, { quiet });
    } catch (error) {
      if (!quiet) this.failed(error);
      return null;
    }
  }

  select(id) {
    this.reveal = id !== this.current;
    this.current = id;
    this.render();
  }

  // The versions of each conversation that has the searched words in its title, the one used last first.
  get rows() {
    const wanted = byId("search").value.trim().toLowerCase();
    const rows = new Versions(this.list.sessions).groups();
    return wanted ? rows.filter((row) => row.some(({ title }) => title.toLowerCase().includes(wanted))) : rows;
  }

  render() {
    const focused = document.activeElement?.closest("#sessions [data-part]");
    const place = focused && [focused.closest("li").dataset.id, focused.dataset.part];
    const { rows, list, isPersonal } = this;
    byId("sessions").replaceChildren(...rows.slice(0, this.numRows).map((row) => this.row(row)));
    byId("no-sessions").hidden = rows.length > 0;
    byId("no-sessions").textContent = list.sessions.length ? "No title has these words."
      : isPersonal ? "Conversations appear here once you have sent a message."
        : "Sessions that programs began through the API appear here.";
    byId("more-sessions").hidden = rows.length <= this.numRows && !(list.hasMore && list.cursor);
    byId("show-personal").setAttribute("aria-pressed", String(isPersonal));
    byId("show-programs").setAttribute("aria-pressed", String(!isPersonal));
    const shown = this.reveal && byId("sessions").querySelector("li:has([aria-current])");
    if (shown) {
      this.reveal = false;
      shown.scrollIntoView({ block: "nearest" });
    }
    if (place) byId("sessions").querySelector(`[data-id="${CSS.escape(place[0])}"] [data-part="${place[1]}"]`)?.focus();
  }

  row(versions) {
    const [session] = versions;
    const { id, title, turns, updated_at: updated, parent, pinned_until: end } = session;
    const name = title || "Untitled";
    const pinned = isPinned(session);
    const isCurrent = versions.some((version) => version.id === this.current);
    const choose = { class: "choose", "data-part": "choose", "aria-current": isCurrent ? "true" : null };
    const pin = { class: "ghost act pin", "data-part": "pin", "aria-label": `Pin ${name}`, "aria-pressed": pinned + "" };
    const remove = { class: "ghost act", "data-part": "delete", "aria-label": `Delete ${name}`, title: "Delete" };
    pin.title = pinned ? `Pinned until ${time(end)}. Click to unpin.` : "Pin: keep its cache before others' for a day";
    const parts = [plural(turns, "turn"), age(updated), versions.length > 1 && `${versions.length} versions`];
    return el("li", { class: pinned ? "pinned" : null, "data-id": id },
      button({ ...choose, onclick: () => this.open(id) },
        el("span", { class: "name" }, parent && !parent.version && icon("fork"), el("span", {}, name)),
        el("span", { class: "quiet" }, parts.filter(Boolean).join(" · "))),
      button({ ...pin, onclick: () => this.pin(session) }, icon("pin")),
      button({ ...remove, onclick: () => this.remove(versions, name) }, icon("trash")));
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

  async rename(session) {
    byId("new-name").value = session.title;
    const answer = await answerOf(byId("rename-dialog"));
    const title = byId("new-name").value.trim();
    if (answer !== "save" || !title) return;
    try {
      const renamed = await postJson(`/sessions/${session.id}/label`, { title });
      for (const known of [session, this.find(session.id)]) if (known) Object.assign(known, renamed);
      this.render();
    } catch (error) {
      this.failed(error);
    }
  }

  async remove(versions, name) {
    byId("delete-name").textContent = versions.length > 1 ? `${name} (all ${versions.length} versions)` : name;
    if ((await answerOf(byId("delete-dialog"))) !== "delete") return;
    const ids = versions.map(({ id }) => id);
    try {
      for (const id of ids) await removeOne(id);
    } catch (error) {
      this.failed(error);
      return this.refresh();
    }
    announce("Deleted.");
    this.list.sessions = this.list.sessions.filter(({ id }) => !ids.includes(id));
    this.renew();
    this.deleted(ids);
  }
}

async function removeOne(id) {
  try {
    await request("DELETE", `/sessions/${id}`);
  } catch (error) {
    if (error.status !== 404) throw error; // 404: gone already
  }
}

// The server says until when; its clock may differ from this one's by seconds.
const isPinned = ({ pinned_until: end }) => end !== null && end > Date.now() / 1000;
