// A tool call as a card: its name, its arguments as JSON, its result as the user enters it.

import { CodeBlock } from "./code.js";
import { make } from "./dom.js";

// JSON with indentation, or the text as it is while it is not whole.
export function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

// An answer that is one JSON object or list is shown as such.
export const looksStructured = (text) => /^\s*[{[]/.test(text) && isJson(text);

export class ToolCard {
  constructor(call) {
    this.call = call;
    this.code = new CodeBlock("json", pretty(call.function.arguments));
    this.input = make("textarea", {
      rows: "2",
      spellcheck: "false",
      placeholder: "Tool result",
      "aria-label": `Result of ${call.function.name}`,
    });
    this.result = make("label", { className: "result", hidden: true }, "Result", this.input);
    const head = make(
      "div",
      { className: "call-head" },
      make("span", { className: "badge" }, "Tool call"),
      make("strong", { className: "name" }, call.function.name),
    );
    this.element = make(
      "section",
      { className: "call", "aria-label": `Call of ${call.function.name}` },
      head,
      this.code.element,
      this.result,
    );
  }

  update(isWhole) {
    const given = this.call.function.arguments;
    this.code.update(isWhole ? pretty(given) : given, isWhole);
  }

  // Whether the user may enter a result now.
  offer(isOpen) {
    this.result.hidden = !isOpen;
  }
}
