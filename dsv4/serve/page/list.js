// The list of conversations: search, rename, delete with undo, export and import.

import { $, download, iconButton, make, plural, textButton, toast } from "./dom.js";
import { asJson, asMarkdown, read } from "./exchange.js";
import { Conversation, questionText } from "./conversation.js";
import * as store from "./store.js";

const UNDO_SECONDS = 10;
const DAY = 86_400_000;

const fileName = (title) =>
  title
    .replace(/[^\p{L}\p{N} _-]+/gu, "")
    .trim()
    .slice(0, 60) || "conversation";

function ageGroup(time) {
  const today = new Date().setHours(0, 0, 0, 0);
  if (time >= today) return "Today";
  if (time >= today - DAY) return "Yesterday";
  return time >= today - 7 * DAY ? "Last 7 days" : "Earlier";
}

export class List {
  // `acts`: open(fields), current() -> id, isRunning(id), change(one, fields), closed(id)
  constructor(acts) {
    this.acts = acts;
    this.texts = null; // id -> everything that was said there, while a search is on
    $("search").addEventListener("input", () => this.search());
    $("export").addEventListener("click", () => this.exportAll());
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.import([...$("import-file").files]));
  }

  async show() {
    const wanted = $("search").value.trim().toLowerCase();
    if (wanted) this.texts ??= await this.allTexts();
    const all = await store.conversations();
    const found = all.filter(
      (one) =>
        !wanted ||
        one.title.toLowerCase().includes(wanted) ||
        (this.texts.get(one.id) ?? "").includes(wanted),
    );
    const items = [];
    let group = "";
    for (const one of found) {
      const next = one.isPinned ? "Pinned" : ageGroup(one.updated);
      if (next !== group) items.push(make("li", { className: "group" }, next));
      group = next;
      items.push(this.item(one));
    }
    if (!items.length)
      items.push(make("li", { className: "group" }, wanted ? "Nothing found" : "No conversations yet"));
    const focused = document.activeElement?.closest?.("#list li")?.dataset.id;
    $("list").replaceChildren(...items);
    if (focused) $("list").querySelector(`[data-id="${focused}"] button`)?.focus();
    if (wanted) $("found").textContent = plural(found.length, "conversation") + " found";
  }

  item(one) {
    const isOpen = one.id === this.acts.current();
    const open = make(
      "button",
      {
        type: "button",
        className: "open",
        "aria-current": isOpen ? "page" : null,
        onclick: () => this.acts.open(one),
      },
      one.title,
    );
    const row = make("li", { "data-id": one.id, className: isOpen ? "current" : "" }, open);
    if (this.acts.isRunning(one.id)) row.prepend(make("span", { className: "pulse", title: "Answering" }));
    row.append(
      iconButton("more", `Options for ${one.title}`, (event) => this.menu(one, row, event.currentTarget)),
    );
    return row;
  }

  menu(one, row, button) {
    const act = (text, action, className = "") =>
      textButton(
        text,
        () => {
          menu.hidePopover();
          action();
        },
        className,
      );
    const menu = make(
      "div",
      { className: "menu", popover: "auto", role: "group", "aria-label": "Options" },
      act("Rename", () => this.rename(one, row)),
      act(one.isPinned ? "Unpin" : "Pin", () => this.acts.change(one, { isPinned: !one.isPinned })),
      act("Export as Markdown", async () => this.save(one, "md")),
      act("Export as JSON", async () => this.save(one, "json")),
      act("Delete", () => this.delete(one), "danger"),
    );
    menu.addEventListener("toggle", (event) => {
      if (event.newState !== "closed") return;
      menu.remove();
      if (document.activeElement === document.body && button.isConnected) button.focus();
    });
    $("side").append(menu);
    const { right, bottom } = button.getBoundingClientRect();
    menu.showPopover();
    const left = Math.min(right - menu.offsetWidth, innerWidth - menu.offsetWidth - 8);
    menu.style.left = `${Math.max(8, left)}px`;
    menu.style.top = `${Math.min(bottom + 4, innerHeight - menu.offsetHeight - 8)}px`;
    menu.querySelector("button").focus();
  }

  rename(one, row) {
    const input = make("input", { value: one.title, "aria-label": "New name", maxlength: "200" });
    let isOver = false;
    const end = async (isKept) => {
      if (isOver) return;
      isOver = true;
      const title = input.value.trim();
      if (isKept && title && title !== one.title) await this.acts.change(one, { title, isNamed: true });
      else await this.show();
      $("list").querySelector(`[data-id="${one.id}"] button`)?.focus();
    };
    input.addEventListener("keydown", (event) => {
      event.stopPropagation();
      if (event.key === "Enter") end(true);
      if (event.key === "Escape") end(false);
    });
    input.addEventListener("blur", () => end(true));
    row.replaceChildren(input);
    input.focus();
    input.select();
  }

  async save(one, kind) {
    const name = fileName(one.title);
    if (kind === "json") download(`${name}.json`, await asJson([one]), "application/json");
    else download(`${name}.md`, asMarkdown(await Conversation.load(one)), "text/markdown");
  }

  async exportAll() {
    const all = await store.conversations();
    if (!all.length) return void toast("There is nothing to export yet.");
    download(`dsv4-${new Date().toISOString().slice(0, 10)}.json`, await asJson(all), "application/json");
    toast(`${plural(all.length, "conversation")} exported.`);
  }

  async import(files) {
    $("import-file").value = "";
    for (const file of files) {
      try {
        toast(`${plural(await read(await file.text()), "conversation")} imported from ${file.name}.`);
      } catch (problem) {
        toast(`${file.name}: ${problem.message}`, { bad: true, seconds: 15 });
      }
    }
    this.texts = null;
    await this.show();
  }

  async delete(one) {
    const next = $("list").querySelector(`[data-id="${one.id}"] ~ li[data-id] button`);
    await store.saveConversation({ ...one, deleted: Date.now() });
    this.acts.closed(one.id);
    await this.show();
    (next?.isConnected ? next : $("new")).focus();
    const undo = async () => {
      await store.saveConversation({ ...one, deleted: undefined });
      await this.show();
      this.acts.open(one);
    };
    toast(`Deleted “${one.title}”.`, { action: undo, label: "Undo", seconds: UNDO_SECONDS });
  }

  search() {
    clearTimeout(this.timer);
    this.texts = $("search").value ? this.texts : null;
    this.timer = setTimeout(() => this.show(), 120);
  }

  async allTexts() {
    const texts = new Map();
    for (const turn of await store.everyTurn()) {
      const said = turn.role === "user" ? questionText(turn) : (turn.content ?? "");
      texts.set(turn.conversation, `${texts.get(turn.conversation) ?? ""}\n${said}`.toLowerCase());
    }
    return texts;
  }
}
