// Which conversations are versions of one another: forks that say again what followed a turn. Knows no element.

export class Versions {
  // sessions: as the service lists them.
  constructor(sessions) {
    this.byId = new Map(sessions.map((session) => [session.id, session]));
  }

  // The one that this is a version of, or null. One that is deleted, or not listed, still joins its versions.
  parentOf({ parent }) {
    if (!parent?.version) return null;
    return this.byId.get(parent.session_id) ?? { id: parent.session_id, turns: 0, parent: null };
  }

  // The first one, of which all the others are versions.
  firstOf(session) {
    const parent = this.parentOf(session);
    return parent ? this.firstOf(parent) : session;
  }

  // In lists of those that belong together, each in the order of `sessions`.
  groups() {
    return [...Map.groupBy(this.byId.values(), (session) => this.firstOf(session).id).values()];
  }

  // The one that has this turn first: its versions share it with it.
  ownerOf(session, turn) {
    const parent = this.parentOf(session);
    return parent && session.parent.turn >= turn ? this.ownerOf(parent, turn) : session;
  }

  // Of those that have a turn of this number after the same turns, the first one.
  originOf(owner, turn) {
    const parent = this.parentOf(owner);
    return parent && owner.parent.turn === turn - 1 ? this.originOf(this.ownerOf(parent, turn), turn) : owner;
  }

  // What there is of this turn, the oldest first: [{id, isShown}], where id is of the conversation used last.
  of(session, turn) {
    const shown = this.ownerOf(session, turn);
    const origin = this.originOf(shown, turn).id;
    const found = new Map(); // by the owner's id; the list has the one used last first
    for (const other of this.byId.values()) {
      const owner = this.ownerOf(other, turn);
      if (other.turns < turn || found.has(owner.id) || this.originOf(owner, turn).id !== origin) continue;
      found.set(owner.id, { id: other.id, isShown: owner.id === shown.id, at: owner.created_at ?? 0 });
    }
    return [...found.values()].reverse().sort((one, other) => one.at - other.at); // within a second, as they were used
  }
}
