// Markdown to nodes: markdown-it makes tokens, this file makes elements of them. HTML in answers stays text.

import { CodeBlock } from "./code.js";
import { make } from "./dom.js";
import { formula } from "./math.js";
import MarkdownIt from "./vendor/markdown-it.js";

const MAX_FORMULA = 4000;
const MAX_CELLS = 5000;
const LINK = /^(https?:\/\/|mailto:)/i;

const parser = new MarkdownIt({ html: false, linkify: true, typographer: false, maxNesting: 40 });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false });
parser.validateLink = (url) => LINK.test(url);
parser.inline.ruler.before("escape", "formula", inlineFormula);
const ALT = { alt: ["paragraph", "reference", "blockquote", "list"] };
parser.block.ruler.before("fence", "formula", blockFormula, ALT);

// `$…$` as pandoc has it: no space inside the marks and no digit after, so that "$5 and $6" stay prices.
function inlineFormula(state, silent) {
  const { src, pos } = state;
  const two = src.slice(pos, pos + 2);
  const [open, close] =
    two === "$$"
      ? ["$$", "$$"]
      : two[0] === "$"
        ? ["$", "$"]
        : two === "\\("
          ? ["\\(", "\\)"]
          : two === "\\["
            ? ["\\[", "\\]"]
            : ["", ""];
  if (!open) return false;
  const ahead = src.slice(pos + open.length, pos + open.length + MAX_FORMULA);
  let end = ahead.indexOf(close);
  if (open === "$") {
    while (end > 0 && ahead[end - 1] === "\\") end = ahead.indexOf("$", end + 1);
    if (end > 0 && (/^\s|\s$/.test(ahead.slice(0, end)) || /\d/.test(ahead[end + 1] ?? ""))) return false;
  }
  if (end <= 0 || !ahead.slice(0, end).trim()) return false;
  if (!silent) {
    const token = state.push("formula", "", 0);
    token.content = ahead.slice(0, end).trim();
    token.meta = { isDisplay: open === "$$" || open === "\\[" };
  }
  state.pos = pos + open.length + end + close.length;
  return true;
}

// A formula of its own lines, between `$$` and `$$` or `\[` and `\]`.
function blockFormula(state, first, last, silent) {
  const begin = state.bMarks[first] + state.tShift[first];
  const open = state.src.slice(begin, begin + 2);
  const close = { $$: "$$", "\\[": "\\]" }[open];
  if (!close) return false;
  let content = "";
  for (let line = first; line < last && content.length < MAX_FORMULA; line++) {
    const from = line === first ? begin + 2 : state.bMarks[line] + state.tShift[line];
    const text = state.src.slice(from, state.eMarks[line]);
    const end = text.indexOf(close);
    if (end < 0) {
      content += text + "\n";
      continue;
    }
    if (text.slice(end + 2).trim()) return false;
    if (silent) return true;
    const token = state.push("formula", "", 0);
    token.block = true;
    token.content = (content + text.slice(0, end)).trim();
    token.meta = { isDisplay: true };
    token.map = [first, line + 1];
    state.line = line + 1;
    return true;
  }
  return false;
}

// Split a source into its top-level blocks: [{ start, end, tokens }], offsets in characters.
export function blocks(source, env) {
  const tokens = parser.parse(source, env);
  const lines = [0];
  for (let at = source.indexOf("\n"); at >= 0; at = source.indexOf("\n", at + 1)) lines.push(at + 1);
  const found = [];
  let group = [],
    level = 0;
  for (const token of tokens) {
    group.push(token);
    level += token.nesting;
    if (level > 0) continue;
    const [first, last] = group[0].map;
    found.push({ start: lines[first], end: lines[last] ?? source.length, tokens: group });
    group = [];
  }
  return found;
}

// The elements of one block's tokens.
export function elements(tokens) {
  const root = document.createDocumentFragment();
  fill(root, tokens);
  return root;
}

function fill(root, tokens) {
  const open = [root];
  let cells = 0;
  for (const token of tokens) {
    const here = open[open.length - 1];
    if (token.nesting < 0) {
      if (!token.hidden) open.pop();
    } else if (token.nesting > 0) {
      if (token.hidden) continue;
      if (token.type === "table_open" || token.type === "tr_open") cells += 1;
      const element = begin(token);
      here.append(element);
      // A wide table scrolls inside its own box.
      open.push(element.matches?.(".table") ? element.firstChild : element);
    } else if (token.children && token.type !== "image") {
      if (++cells > MAX_CELLS) here.append(token.content);
      else fill(here, token.children);
    } else here.append(leaf(token));
  }
}

function begin(token) {
  const tag = token.tag;
  if (tag === "a") return link(token.attrGet("href"), token.attrGet("title"));
  if (tag === "table") {
    const table = make("table");
    return make("div", { className: "table", tabindex: "0", role: "region", "aria-label": "Table" }, table);
  }
  // Below a turn's own heading; `rendering.js` sets the levels.
  if (/^h[1-6]$/.test(tag)) return make("h3", { className: tag });
  if (tag === "th" || tag === "td") {
    const side = /text-align:(left|right|center)/.exec(token.attrGet("style") ?? "");
    return make(tag, { className: side ? side[1] : "", scope: tag === "th" ? "col" : null });
  }
  if (tag === "ol") return make("ol", { start: token.attrGet("start") });
  const known = ["p", "ul", "li", "blockquote", "thead", "tbody", "tr", "strong", "em", "s"];
  return make(known.includes(tag) ? tag : "span");
}

function link(href, title) {
  const safe = LINK.test(href ?? "");
  const properties = { href, title: title || href, target: "_blank", rel: "noopener noreferrer nofollow" };
  return make("a", safe ? properties : {});
}

function leaf(token) {
  switch (token.type) {
    case "fence":
    case "code_block":
      return new CodeBlock(languageOf(token), token.content).element;
    case "code_inline":
      return make("code", {}, token.content);
    case "formula":
      return formula(token.content, token.meta.isDisplay);
    case "hardbreak":
      return make("br");
    case "softbreak":
      return document.createTextNode("\n");
    case "hr":
      return make("hr");
    case "image": {
      // Not loaded: a request would tell its server who reads this.
      const element = link(token.attrGet("src"), null);
      element.append(`image: ${token.content || token.attrGet("src")}`);
      return element;
    }
    default:
      return document.createTextNode(token.content);
  }
}

export const languageOf = (token) => (token.info ?? "").trim().split(/\s+/)[0].slice(0, 30);
