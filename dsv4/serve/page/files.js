// Attached texts: read, checked, shown as cards with their token count.

import { ask } from "./api.js";
import { bytes, icon, iconButton, make, plural } from "./dom.js";

const MAX_BYTES = 8_000_000; // the server takes bodies of 10 MB
export const LONG_PASTE = 2000;

// -> { name, text, size }, or an Error in words.
export async function readFile(file) {
  if (file.size > MAX_BYTES) {
    throw new Error(`${file.name} has ${bytes(file.size)}; at most ${bytes(MAX_BYTES)} can be attached.`);
  }
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch (problem) {
    throw new Error(
      problem instanceof TypeError
        ? `${file.name} is not a text file (UTF-8); only text can be attached.`
        : `${file.name} cannot be read: ${problem.message}`,
    );
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not a text file; only text can be attached.`);
  return { name: file.name, text, size: file.size };
}

// How many tokens a text has; the server's tokenizer counts.
export async function countTokens(text) {
  const answer = await ask("/tokenize", { body: { prompt: text } });
  return (await answer.json()).count;
}

function showText(file) {
  const close = () => dialog.close();
  const dialog = make(
    "dialog",
    { className: "sheet", "aria-label": file.name, onclose: () => dialog.remove() },
    make("header", {}, make("h2", {}, file.name), iconButton("close", "Close", close)),
    make("pre", { className: "file-text", tabindex: "0" }, file.text.slice(0, 200000)),
  );
  document.body.append(dialog);
  dialog.showModal();
}

export function fileCard(file, remove) {
  const size = make("span", { className: "dim" });
  const show = () => {
    size.textContent =
      file.tokens !== undefined ? plural(file.tokens, "token") : bytes(file.size ?? file.text.length);
  };
  show();
  const open = make(
    "button",
    { type: "button", className: "file-open", title: "Show the text", onclick: () => showText(file) },
    icon("file"),
    make("span", { className: "file-name" }, file.name),
    size,
  );
  const card = make("div", { className: "file" }, open);
  if (remove) card.append(iconButton("close", `Remove ${file.name}`, remove));
  if (file.tokens === undefined && remove) {
    // A server that is busy or away does not keep a file from being attached: the card then shows bytes.
    countTokens(file.text).then(
      (number) => {
        file.tokens = number;
        show();
      },
      () => {},
    );
  }
  return card;
}
