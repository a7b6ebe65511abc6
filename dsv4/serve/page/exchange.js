// Conversations to files and back: JSON keeps everything, Markdown keeps the turns that are shown.

import { Conversation, questionText } from "./conversation.js";
import { newId } from "./dom.js";
import * as store from "./store.js";

const FORMAT = "dsv4-conversations";
const VERSION = 1;

export async function asJson(list) {
  const kept = await Promise.all(list.map(async (one) => ({ ...one, turns: await store.turnsOf(one.id) })));
  return JSON.stringify({ format: FORMAT, version: VERSION, conversations: kept }, null, 1);
}

// A comment with a random mark of this file begins each turn, so that no answer can imitate one.
export function asMarkdown(conversation) {
  const mark = newId();
  const parts = [`<!-- dsv4 ${mark} title -->\n# ${conversation.title}\n`];
  for (const turn of conversation.path()) {
    if (turn.role === "user") parts.push(`<!-- dsv4 ${mark} user -->\n## You\n\n${questionText(turn)}\n`);
    else if (turn.role === "tool") {
      const results = turn.results.map((result) => result.content).join("\n\n");
      parts.push(`<!-- dsv4 ${mark} note -->\n## Tool results\n\n${results}\n`);
    } else {
      const calls = (turn.calls ?? []).map(
        ({ function: { name, arguments: given } }) => `Called \`${name}\`:\n\n\`\`\`json\n${given}\n\`\`\`\n`,
      );
      const body = [turn.content, ...calls].filter(Boolean).join("\n\n");
      parts.push(`<!-- dsv4 ${mark} assistant -->\n## Assistant\n\n${body}\n`);
    }
  }
  return parts.join("\n");
}

// Read a file of either kind and keep what it has, under new ids. -> how many conversations
export async function read(text) {
  const found = text.trimStart().startsWith("{") ? fromJson(text) : fromMarkdown(text);
  for (const one of found) await store.saveAll(one, [...one.turns.values()]);
  return found.length;
}

function fromJson(text) {
  let data;
  try {
    data = JSON.parse(text);
  } catch (problem) {
    throw new Error(`The file is not JSON: ${problem.message}`);
  }
  if (data.format !== FORMAT || !Array.isArray(data.conversations)) {
    throw new Error(`The file is JSON without "format": "${FORMAT}"; expected an export of this page.`);
  }
  if (data.version > VERSION)
    throw new Error(`The file has version ${data.version}; this page reads ${VERSION}.`);
  return data.conversations.map(imported);
}

const isText = (value) => typeof value === "string";

function checked(turn) {
  const files = turn?.files ?? [];
  const calls = turn?.calls ?? [];
  const holds =
    ["user", "assistant", "tool"].includes(turn?.role) &&
    isText(turn.id) &&
    (turn.role === "tool"
      ? Array.isArray(turn.results) && turn.results.every((one) => isText(one.content))
      : isText(turn.content)) &&
    (turn.reasoning === undefined || isText(turn.reasoning)) &&
    files.every((file) => isText(file.name) && isText(file.text)) &&
    calls.every((call) => isText(call.function?.name) && isText(call.function?.arguments));
  if (!holds) throw new Error("The file has a turn that is damaged; export it again.");
  return turn;
}

function imported({ turns, ...fields }) {
  if (!Array.isArray(turns)) throw new Error("The file has a conversation without turns; export it again.");
  const one = new Conversation({ title: String(fields.title ?? "Imported"), isNamed: true });
  const ids = new Map(turns.map((turn) => [checked(turn).id, newId()]));
  for (const turn of turns) {
    const id = ids.get(turn.id);
    one.turns.set(id, {
      ...turn,
      id,
      conversation: one.id,
      parent: ids.get(turn.parent) ?? null,
      created: Number(turn.created) || Date.now(),
    });
  }
  for (const [at, id] of Object.entries(fields.picks ?? {})) one.picks[ids.get(at) ?? at] = ids.get(id);
  return one;
}

function fromMarkdown(text) {
  const mark = /<!-- dsv4 ([0-9a-f]{24}) title -->\n# (.*)/.exec(text);
  if (!mark) throw new Error("The file is neither JSON nor Markdown that this page has exported.");
  const one = new Conversation({ title: mark[2], isNamed: true });
  const parts = text.split(
    new RegExp(`<!-- dsv4 ${mark[1]} (user|assistant) -->\\n## (?:You|Assistant)\\n\\n`),
  );
  let parent = null;
  for (let at = 1; at + 1 < parts.length; at += 2) {
    const turn = {
      id: newId(),
      conversation: one.id,
      parent,
      role: parts[at],
      created: one.created + at,
      content: parts[at + 1].split(`<!-- dsv4 ${mark[1]} note -->`)[0].trim(),
    };
    if (turn.role === "assistant") turn.finish = "stop";
    one.turns.set(turn.id, turn);
    parent = turn.id;
  }
  return [one];
}
