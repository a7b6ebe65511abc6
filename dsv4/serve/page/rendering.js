// An answer that grows: finished blocks stay as they are, only the last one is made again.

import { CodeBlock } from "./code.js";
import { make } from "./dom.js";
import { blocks, elements, languageOf } from "./markdown.js";

// The share of time that rendering may take.
const SHARE = 0.1;
const MIN_WAIT_MS = 80;
// Longer text is shown as it is, in pieces that are laid out only when they come into view.
const MAX_LINE = 8000;
const MAX_BLOCK = 40000;
const MAX_MARKDOWN = 600000;
const MAX_BLOCKS = 5000;
const SLOW_MS = 400;
const PIECE = 20000;

export class Rendering {
  // `changed` is called after the element has grown.
  constructor(element, changed = () => {}) {
    this.element = element;
    this.changed = changed;
    this.source = "";
    this.start = 0; // of the block that may still change
    this.limit = null; // from here on text is plain
    this.tail = []; // that block's nodes
    this.code = null; // { start, block } where it is a code block
    this.references = {}; // defined in finished text
    this.count = 0;
    this.timer = null;
    this.wait = MIN_WAIT_MS;
  }

  push(text) {
    this.source += text;
    this.timer ??= setTimeout(() => this.render(false), this.wait);
  }

  finish() {
    this.render(true);
    this.link();
    this.setLevels();
  }

  // Number headings below the turn's own (2) without skipping a level.
  setLevels() {
    let level = 2;
    for (const heading of this.element.querySelectorAll("h3")) {
      level = Math.min(Number(heading.className[1]) + 2, level + 1);
      heading.setAttribute("aria-level", level);
    }
  }

  link() {
    // Links may come before what they refer to.
    if (this.limit !== null || !Object.keys(this.references).length) return;
    this.element.replaceChildren();
    this.start = this.count = 0;
    this.tail = [];
    this.render(true);
  }

  render(isWhole) {
    clearTimeout(this.timer);
    this.timer = null;
    const began = performance.now();
    if (this.limit === null) this.renderMarkdown(isWhole);
    if (this.limit !== null) this.renderPlain();
    const parsed = performance.now() - began;
    this.changed();
    const spent = performance.now() - began;
    this.wait = Math.max(MIN_WAIT_MS, spent / SHARE);
    if (parsed > SLOW_MS && !isWhole) this.limit ??= this.start;
  }

  renderMarkdown(isWhole) {
    const limit = this.excess();
    const source = this.source.slice(this.start, limit ?? undefined);
    const env = { references: { ...this.references } };
    const found = blocks(source, env);
    const last = found.at(-1);
    const base = this.start;
    for (const block of found) {
      const isTail = block === last && limit === null && !isWhole;
      this.show(block, base + block.start, !isTail);
      if (isTail) this.start = base + block.start;
      else this.settle();
    }
    if (limit !== null) {
      this.start = limit;
      this.limit = limit;
    } else if (isWhole) this.start = this.source.length;
    const isNew = Object.keys(env.references).length > Object.keys(this.references).length;
    // Half a definition looks like one of another address: take only those above the last block.
    if (isNew && this.start > base) blocks(this.source.slice(base, this.start), this);
  }

  // The place from which text is shown as it is, or null.
  excess() {
    const { source, start } = this;
    if (this.count > MAX_BLOCKS) return start;
    let block = start,
      at = start;
    while (at < source.length) {
      const newline = source.indexOf("\n", at);
      const end = newline < 0 ? source.length : newline;
      if (end === at) block = at;
      const isTooLong = end - at > MAX_LINE || end > MAX_MARKDOWN;
      if (isTooLong || end - block > MAX_BLOCK) return Math.max(block, start);
      at = end + 1;
    }
    return null;
  }

  // The last block's nodes, in place of those that it had before.
  show(block, start, isWhole) {
    const token = block.tokens.length === 1 && block.tokens[0].type === "fence" ? block.tokens[0] : null;
    if (token && this.code?.start === start && this.code.block.language === languageOf(token).toLowerCase()) {
      return this.code.block.update(token.content, isWhole);
    }
    for (const node of this.tail) node.remove();
    this.code = token ? { start, block: new CodeBlock(languageOf(token), token.content) } : null;
    const fresh = token ? this.code.block.element : elements(block.tokens);
    this.tail = token ? [fresh] : [...fresh.childNodes];
    this.element.append(fresh);
  }

  settle() {
    this.tail = [];
    this.code = null;
    this.count += 1;
  }

  renderPlain() {
    for (const node of this.tail) node.remove();
    this.tail = [];
    while (this.start < this.source.length) {
      const piece = this.source.slice(this.start, this.start + PIECE);
      const box = make("div", { className: "plain" }, piece);
      this.element.append(box);
      if (piece.length < PIECE) {
        this.tail = [box];
        return;
      }
      this.start += PIECE;
    }
  }
}

// A text that has arrived, all at once.
export function rendered(element, text) {
  const rendering = new Rendering(element);
  rendering.source = text;
  rendering.finish();
}
