// One conversation: a tree of turns. A question that was edited and an answer that was retried are siblings.
//
// A turn: { id, conversation, parent, role, created } and, of a question, { content, files }, of an answer
// { content, reasoning, calls, finish, error, usage, ... }, of tools' results { results }.

import { newId } from "./dom.js";
import * as store from "./store.js";

const ROOT = "root";

export class Conversation {
  constructor(fields = {}, turns = []) {
    const now = Date.now();
    Object.assign(
      this,
      { id: newId(), title: "New conversation", isNamed: false, created: now, updated: now, picks: {} },
      fields,
    );
    this.turns = new Map(turns.map((turn) => [turn.id, turn]));
    this.isKept = turns.length > 0;
  }

  static async load(fields) {
    return new Conversation(fields, await store.turnsOf(fields.id));
  }

  siblings(parent) {
    const found = [...this.turns.values()].filter((turn) => (turn.parent ?? ROOT) === (parent ?? ROOT));
    return found.sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
  }

  // The turns that are shown: at every fork the picked one, else the latest.
  path() {
    const children = new Map();
    for (const turn of this.turns.values()) {
      const key = turn.parent ?? ROOT;
      children.set(key, [...(children.get(key) ?? []), turn]);
    }
    const found = [];
    for (let at = ROOT; children.has(at); at = found.at(-1).id) {
      const choices = children.get(at).sort((a, b) => a.created - b.created || (a.id < b.id ? -1 : 1));
      found.push(choices.find((turn) => turn.id === this.picks[at]) ?? choices.at(-1));
    }
    return found;
  }

  before(turn) {
    const path = [];
    for (let at = this.turns.get(turn.parent); at; at = this.turns.get(at.parent)) path.unshift(at);
    return path;
  }

  pick(turn) {
    this.picks[turn.parent ?? ROOT] = turn.id;
    return store.saveConversation(this);
  }

  // Add a turn below `parent` and show it.
  add(parent, fields) {
    const last = Math.max(0, ...this.siblings(parent?.id).map((turn) => turn.created));
    const created = Math.max(Date.now(), last + 1);
    const turn = { id: newId(), conversation: this.id, parent: parent?.id ?? null, created, ...fields };
    this.turns.set(turn.id, turn);
    this.picks[turn.parent ?? ROOT] = turn.id;
    this.updated = Date.now();
    if (!this.isNamed && turn.role === "user" && !turn.parent) this.title = titleOf(turn);
    this.isKept = true;
    store.saveAll(this, [turn]);
    return turn;
  }

  save(turn) {
    this.updated = Date.now();
    return store.saveAll(this, [turn]);
  }

  // Take a turn out, with all that follows it. -> what `restore` puts back
  remove(turn) {
    const gone = [turn];
    for (const one of gone) gone.push(...this.siblings(one.id));
    for (const one of gone) {
      this.turns.delete(one.id);
      one.deleted = Date.now();
    }
    store.saveAll(this, gone);
    return gone;
  }

  restore(turns) {
    for (const turn of turns) {
      delete turn.deleted;
      this.turns.set(turn.id, turn);
    }
    return store.saveAll(this, turns);
  }
}

function titleOf(turn) {
  const line = turn.content.trim().split("\n")[0] || turn.files?.[0]?.name || "New conversation";
  return line.length > 80 ? `${line.slice(0, 79)}…` : line;
}

// A question with its files as the model gets to see it.
export function questionText({ content, files = [] }) {
  const parts = files.map((file) => `File ${file.name}:\n\n${file.text.replace(/\n*$/, "\n")}`);
  return [...parts, content].filter(Boolean).join("\n");
}

// Turns as messages of the API, without answers that have no text.
export function messagesOf(turns) {
  return turns.flatMap((turn) => {
    if (turn.role === "user") return [{ role: "user", content: questionText(turn) }];
    if (turn.role === "tool") {
      return turn.results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }));
    }
    if (!turn.content && !turn.calls?.length) return [];
    const message = { role: "assistant", content: turn.content };
    if (turn.reasoning) message.reasoning_content = turn.reasoning;
    if (turn.calls?.length) message.tool_calls = turn.calls;
    return [message];
  });
}
