// The message field: text, attached files, Enter, history, drafts.

import { fileCard, LONG_PASTE, readFile } from "./files.js";
import { $, announce, isTouch, toast } from "./dom.js";
import { local } from "./local.js";

const DRAFT = "dsv4.draft";

export class Composer {
  // `send(text, files)`; `recall()` -> earlier questions, the latest last.
  constructor({ send, recall }) {
    Object.assign(this, { send, recall, files: [], back: 0, draft: "", pasted: 0 });
    this.field = $("question");
    this.field.value = local.get(DRAFT);
    this.field.enterKeyHint = isTouch() ? "enter" : "send";
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.field.addEventListener("input", () => {
      this.back = 0;
      this.fit();
    });
    this.field.addEventListener("keydown", (event) => this.key(event));
    this.field.addEventListener("paste", (event) => this.paste(event));
    $("attach").addEventListener("click", () => $("file").click());
    $("file").addEventListener("change", () => {
      this.attach([...$("file").files]);
      $("file").value = "";
    });
    this.takeDrops();
    this.fit();
  }

  submit() {
    const text = this.field.value.trim();
    if (!text && !this.files.length) return;
    if (this.send(text, this.files) === false) return;
    this.files = [];
    this.set("");
    this.showFiles();
  }

  set(text) {
    this.field.value = text;
    this.fit();
  }

  // Fit the field's height to its text, and keep the draft.
  fit() {
    const { field } = this;
    field.style.height = "auto";
    field.style.height = `${field.scrollHeight + field.offsetHeight - field.clientHeight}px`;
    local.set(DRAFT, field.value);
  }

  key(event) {
    if (event.isComposing) return;
    const { field } = this;
    // Touch keyboards have no Shift-Enter: there Enter breaks the line, and the button sends.
    if (event.key === "Enter" && !event.shiftKey && !isTouch()) {
      event.preventDefault();
      this.submit();
    } else if (event.key === "ArrowUp" && (!field.value || this.back)) this.walk(event, 1);
    else if (event.key === "ArrowDown" && this.back) this.walk(event, -1);
  }

  walk(event, step) {
    const earlier = this.recall();
    const back = this.back + step;
    if (back < 0 || back > earlier.length) return;
    event.preventDefault();
    this.back = back;
    this.set(back ? earlier.at(-back) : "");
  }

  paste(event) {
    const files = [...(event.clipboardData?.files ?? [])];
    const text = event.clipboardData?.getData("text/plain") ?? "";
    if (files.length && !text) {
      event.preventDefault();
      this.attach(files);
    } else if (text.length > LONG_PASTE) {
      event.preventDefault();
      this.pasted += 1;
      this.add({ name: `pasted-${this.pasted}.txt`, text, size: text.length });
    }
  }

  takeDrops() {
    let depth = 0;
    const has = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
    const over = (isOver) => document.body.classList.toggle("dropping", isOver);
    addEventListener("dragenter", (event) => has(event) && over(++depth > 0));
    addEventListener("dragleave", (event) => has(event) && over(--depth > 0));
    addEventListener("dragover", (event) => has(event) && event.preventDefault());
    addEventListener("drop", (event) => {
      if (!has(event)) return;
      event.preventDefault();
      over((depth = 0) > 0);
      this.attach([...event.dataTransfer.files]);
    });
  }

  async attach(files) {
    for (const file of files) {
      try {
        this.add(await readFile(file));
      } catch (problem) {
        toast(problem.message, { bad: true, seconds: 10 });
      }
    }
    this.field.focus();
  }

  add(file) {
    this.files.push(file);
    this.showFiles();
    announce(`${file.name} is attached.`);
  }

  showFiles() {
    const cards = this.files.map((file) =>
      fileCard(file, () => {
        this.files = this.files.filter((one) => one !== file);
        this.showFiles();
        this.field.focus();
      }),
    );
    $("files").replaceChildren(...cards);
    $("files").hidden = !cards.length;
  }
}
