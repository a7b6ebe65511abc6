// Conversations in IndexedDB: one record per conversation, one per turn, so that two tabs do not overwrite
// each other. Without IndexedDB, or when it is full, they stay in memory, and `onproblem` gets the reason.

const NAME = "dsv4";
const STORES = ["conversations", "turns"];

let database = null;
const memory = { conversations: new Map(), turns: new Map() };
const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel(NAME) : null;

let onproblem = () => {};
let onchange = () => {};

// `problem(text)` when something cannot be kept; `change(conversationId)` when another tab has changed one.
export async function open(problem, change) {
  onproblem = problem;
  onchange = change;
  channel?.addEventListener("message", (event) => onchange(event.data));
  try {
    database = await new Promise((resolve, reject) => {
      const request = indexedDB.open(NAME, 1);
      request.onupgradeneeded = () => {
        request.result.createObjectStore("conversations", { keyPath: "id" });
        request.result
          .createObjectStore("turns", { keyPath: "id" })
          .createIndex("conversation", "conversation");
      };
      request.onsuccess = () => resolve(request.result);
      request.onerror = () => reject(request.error);
      request.onblocked = () => reject(new Error("another tab holds an older version"));
    });
    database.onversionchange = () => database.close();
  } catch (error) {
    const why = error?.message ?? "no IndexedDB";
    onproblem(
      `This browser does not keep conversations here (${why}). They end with this tab; export what matters.`,
    );
  }
  navigator.storage?.persist?.().catch(() => {});
}

function done(transaction) {
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = transaction.onerror = () => reject(transaction.error ?? new Error("aborted"));
  });
}

async function write(changes, id) {
  for (const [name, value] of changes) memory[name].set(value.id, value);
  if (!database) return;
  try {
    const transaction = database.transaction(STORES, "readwrite");
    const end = done(transaction);
    end.catch(() => {});
    for (const [name, value] of changes) transaction.objectStore(name).put(value);
    transaction.commit(); // a closing page does not wait for its requests
    await end;
    for (const [name, value] of changes) memory[name].delete(value.id);
    channel?.postMessage(id);
  } catch (error) {
    const full = error?.name === "QuotaExceededError";
    onproblem(
      full
        ? "The browser's storage is full. What is new stays in this tab only: export it, or delete some."
        : `The browser could not store this (${error?.message ?? error}). It is kept in this tab only.`,
    );
  }
}

export const saveConversation = (one) => write([["conversations", record(one)]], one.id);
export const saveTurn = (turn) => write([["turns", turn]], turn.conversation);
export const saveAll = (one, turns) =>
  write([["conversations", record(one)], ...turns.map((turn) => ["turns", turn])], one.id);

function record({ id, title, isNamed, isPinned, created, updated, deleted, picks }) {
  return { id, title, isNamed, isPinned, created, updated, deleted, picks };
}

async function all(name, index, key) {
  const kept = [...memory[name].values()].filter((value) => !index || value[index] === key);
  if (!database) return kept;
  const store = database.transaction(name).objectStore(name);
  const request = index ? store.index(index).getAll(key) : store.getAll();
  const stored = await new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  const newer = new Set(kept.map((value) => value.id));
  return [...stored.filter((value) => !newer.has(value.id)), ...kept];
}

const isThere = (one) => !one.deleted;

// All that are not deleted, pinned ones first, then the latest.
export async function conversations() {
  const found = (await all("conversations")).filter(isThere);
  return found.sort((a, b) => Boolean(b.isPinned) - Boolean(a.isPinned) || b.updated - a.updated);
}

export const turnsOf = async (id) => (await all("turns", "conversation", id)).filter(isThere);
export const everyTurn = async () => (await all("turns")).filter(isThere);

// Erase what was deleted before `time`.
export async function purge(time) {
  const isGone = (one) => one.deleted && one.deleted < time;
  const gone = (await all("conversations")).filter(isGone);
  const ids = new Set(gone.map((one) => one.id));
  const turns = (await all("turns")).filter((turn) => isGone(turn) || ids.has(turn.conversation));
  for (const one of gone) memory.conversations.delete(one.id);
  for (const turn of turns) memory.turns.delete(turn.id);
  if (!database) return;
  const transaction = database.transaction(STORES, "readwrite");
  for (const one of gone) transaction.objectStore("conversations").delete(one.id);
  for (const turn of turns) transaction.objectStore("turns").delete(turn.id);
  await done(transaction);
}
