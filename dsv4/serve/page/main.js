// The chat page: puts its parts together, and the keys that work everywhere.

import { get } from "./api.js";
import { Chat } from "./chat.js";
import { Composer } from "./composer.js";
import { $, announce, duration, make, toast } from "./dom.js";
import { List } from "./list.js";
import { local } from "./local.js";
import { loadFacts, model, untilReady } from "./model.js";
import { openSettings, startSettings } from "./settings.js";
import * as store from "./store.js";

const WATCH_MS = 5000;
const CHANGES_MS = 300;
const PURGE_AFTER_MS = 60_000;
const SIDE = "dsv4.side";
const narrow = matchMedia("(max-width: 60rem)");

const chat = new Chat(() => list.show());
const list = new List({
  open: async (fields) => {
    await chat.open(fields);
    closeDrawer();
    list.show();
  },
  current: () => chat.conversation.id,
  isRunning: (id) => chat.runs.has(id),
  change: async (one, fields) => {
    // What is open or being answered would be saved as it was.
    const isOpen = one.id === chat.conversation.id;
    const known = isOpen ? chat.conversation : (chat.runs.get(one.id)?.conversation ?? { ...one });
    await store.saveConversation(Object.assign(known, fields));
    if (isOpen) chat.draw();
    await list.show();
  },
  closed: (id) => {
    const run = chat.runs.get(id);
    if (run) run.conversation.deleted = Date.now(); // a late save must not restore it
    run?.stop();
    if (chat.conversation.id === id) chat.fresh();
  },
});
const composer = new Composer({
  send: (text, files) => chat.send(text, files),
  recall: () => chat.path.filter((turn) => turn.role === "user" && turn.content).map((turn) => turn.content),
});

function fresh() {
  chat.fresh();
  closeDrawer();
  list.show();
  $("question").focus();
}

// The list beside the page, or over it where there is no room.

function setSide(isOpen) {
  document.body.classList.toggle("side-open", isOpen);
  $("side").inert = !isOpen;
  $("menu").setAttribute("aria-expanded", String(isOpen));
  $("page").inert = isOpen && narrow.matches;
  if (!narrow.matches) local.set(SIDE, isOpen ? "" : "closed");
}

function closeDrawer() {
  if (narrow.matches && document.body.classList.contains("side-open")) {
    setSide(false);
    $("menu").focus();
  }
}

function toggleSide() {
  const isOpen = !document.body.classList.contains("side-open");
  setSide(isOpen);
  if (isOpen) $(narrow.matches ? "new" : "search").focus();
  else $("menu").focus();
}

narrow.addEventListener("change", () => setSide(!narrow.matches && local.get(SIDE) !== "closed"));

// The line under the header: the model loads, the server is away.

function showBanner(text, share = null) {
  const banner = $("banner");
  banner.hidden = !text;
  if (!text) return banner.replaceChildren();
  if (banner.firstChild?.textContent !== text) {
    banner.replaceChildren(
      make("span", {}, text),
      make("progress", {
        max: "1",
        "aria-label": "Loading",
        value: share ?? undefined,
        hidden: share === null,
      }),
    );
  }
  const bar = banner.querySelector("progress");
  bar.hidden = share === null;
  if (share !== null) bar.value = share;
}

let loadingSince = null;

async function start() {
  loadingSince = performance.now();
  await untilReady(({ phase, fraction, message, status }) => {
    if (status === 0) return showBanner("The server cannot be reached. Trying again…");
    if (status === 401) return showBanner(message);
    const seconds = (performance.now() - loadingSince) / 1000;
    const left =
      fraction > 0.02 && seconds * (1 - fraction) > fraction
        ? `, about ${duration((seconds * (1 - fraction)) / fraction)} left`
        : "";
    const share = typeof fraction === "number" ? fraction : null;
    const percent = share === null ? "" : `: ${Math.floor(100 * share)} %${left}`;
    showBanner(
      phase ? `The model is loading (${phase})${percent}` : `The model is not ready yet: ${message}`,
      share,
    );
  });
  showBanner("");
  await loadFacts().catch((problem) => toast(problem.message, { bad: true }));
  $("model").textContent = model.name;
  chat.draw();
  if (!chat.path.length) chat.show(chat.conversation);
}

// Notice that the server is away before the next question, and that it is back.
async function watch() {
  try {
    await get("/health");
    if (!$("banner").hidden) await start();
  } catch {
    showBanner("The server cannot be reached. Trying again…");
  }
  setTimeout(watch, WATCH_MS);
}

function keys(event) {
  const isField = event.target.closest?.("input, textarea, select");
  const meta = event.ctrlKey || event.metaKey;
  const isModal = document.querySelector("dialog[open]");
  if (event.key === "Escape" && !isModal) {
    if (document.querySelector(":popover-open")) return;
    if (narrow.matches && document.body.classList.contains("side-open")) closeDrawer();
    else if (chat.run) chat.stop();
    return;
  }
  if (isModal) return;
  const act =
    meta && event.shiftKey && event.key.toLowerCase() === "o"
      ? fresh
      : meta && event.key === "k"
        ? () => {
            setSide(true);
            $("search").focus();
          }
        : meta && event.key === "b"
          ? toggleSide
          : meta && event.key === ","
            ? () => openSettings()
            : event.key === "?" && !isField
              ? () => $("help").showModal()
              : event.key === "/" && !isField
                ? () => $("question").focus()
                : null;
  if (!act) return;
  event.preventDefault();
  act();
}

$("new").addEventListener("click", fresh);
$("new-top").addEventListener("click", fresh);
$("menu").addEventListener("click", toggleSide);
$("veil").addEventListener("click", closeDrawer);
$("stop").addEventListener("click", () => chat.stop());
$("help-toggle").addEventListener("click", () => $("help").showModal());
for (const dialog of document.querySelectorAll("dialog")) {
  dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  dialog.querySelector("[data-close]").addEventListener("click", () => dialog.close());
}
addEventListener("keydown", keys);
addEventListener("pagehide", () => chat.keep());
addEventListener("hashchange", () => openConversation(location.hash.slice(1)));

async function openConversation(id) {
  if (!id || id === chat.conversation.id) return;
  const fields = (await store.conversations()).find((one) => one.id === id);
  if (fields) await chat.open(fields);
  else toast("That conversation is not in this browser.");
  list.show();
}

// Every save repeats the same problem: report it once a minute.
const told = new Map();

function tellProblem(text) {
  if (performance.now() - (told.get(text) ?? -Infinity) < 60_000) return;
  told.set(text, performance.now());
  toast(text, { bad: true, seconds: 20 });
  announce(text);
}

// Another tab reports each save, twice a second while it receives an answer.
const changed = new Set();
let soon = null;

async function takeChanges() {
  soon = null;
  const ids = [...changed];
  changed.clear();
  list.texts = null;
  await list.show();
  if (ids.includes(chat.conversation.id)) await chat.reload();
}

const wanted = location.hash.slice(1);
const question = new URLSearchParams(location.search).get("q");
if (question) composer.set(question); // not sent: a link must not spend another's tokens
startSettings();
setSide(!narrow.matches && local.get(SIDE) !== "closed");
chat.draw();
await store.open(tellProblem, (id) => {
  changed.add(id);
  soon ??= setTimeout(takeChanges, CHANGES_MS);
});
await openConversation(wanted);
await list.show();
document.body.classList.add("is-ready");
store.purge(Date.now() - PURGE_AFTER_MS);
start().then(watch);
