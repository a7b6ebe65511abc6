// Code blocks: language, copy button, highlighting from Prism's tokens.

import { copyButton, lazily, make } from "./dom.js";

const MAX_HIGHLIGHTED = 30000;
const NAMES = {
  py: "python",
  python3: "python",
  js: "javascript",
  mjs: "javascript",
  node: "javascript",
  ts: "typescript",
  sh: "bash",
  shell: "bash",
  zsh: "bash",
  console: "bash",
  html: "markup",
  xml: "markup",
  svg: "markup",
  yml: "yaml",
  "c++": "cpp",
  cu: "cpp",
  cuda: "cpp",
  h: "c",
  "c#": "csharp",
  cs: "csharp",
  rs: "rust",
  golang: "go",
  kt: "kotlin",
  rb: "ruby",
  dockerfile: "docker",
  make: "makefile",
  tex: "latex",
  patch: "diff",
  jsonl: "json",
  json5: "json",
  jl: "julia",
  conf: "ini",
};

const usePrism = lazily(() => import("./vendor/prismjs.js"));

// Replace what `element` shows by highlighted `text`; plain text where there is no grammar or too much of it.
export function highlight(element, text, language) {
  const isPlain = !language || text.length > MAX_HIGHLIGHTED || /[^\n]{1000}/.test(text);
  let isLater = false;
  const draw = (prism) => {
    if (isLater && element.textContent !== text) return;
    const name = NAMES[language] ?? language;
    const grammar = Object.hasOwn(prism.languages, name) ? prism.languages[name] : null;
    if (grammar && typeof grammar === "object") {
      element.replaceChildren(...nodes(prism.tokenize(text, grammar)));
    } else element.textContent = text;
  };
  if (!isPlain && usePrism(draw)) return;
  element.textContent = text;
  isLater = true;
}

function nodes(content) {
  if (typeof content === "string") return [document.createTextNode(content)];
  if (!Array.isArray(content)) return [span(content)];
  return content.flatMap(nodes);
}

function span(token) {
  const alias = Array.isArray(token.alias) ? token.alias[0] : token.alias;
  return make("span", { className: `t-${token.type} ${alias ? `t-${alias}` : ""}` }, ...nodes(token.content));
}

// A code block whose text may grow: `update` changes it in place, so that scrolling and focus stay.
export class CodeBlock {
  constructor(language, text) {
    this.language = language.toLowerCase();
    this.text = "";
    this.code = make("code");
    this.pre = make(
      "pre",
      { tabindex: "0", "aria-label": language ? `Code, ${language}` : "Code" },
      this.code,
    );
    const head = make(
      "figcaption",
      {},
      make("span", {}, language || "text"),
      copyButton("Copy code", () => this.text),
    );
    this.element = make("figure", { className: "code" }, head, this.pre);
    this.update(text, true);
  }

  // Text that arrives is appended as it is; highlighting follows every thousand characters and at the end.
  update(text, isWhole) {
    const grown = text.startsWith(this.text) ? text.slice(this.text.length) : null;
    this.text = text;
    this.pending = (this.pending ?? 0) + (grown?.length ?? text.length);
    if (!isWhole && grown !== null && this.pending < 1000) {
      if (grown) this.code.append(grown);
      return;
    }
    this.pending = 0;
    highlight(this.code, text, this.language);
  }
}
