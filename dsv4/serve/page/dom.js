// Elements, icons and small helpers. Text of models and users enters a page through here, as text nodes only.

export const $ = (id) => document.getElementById(id);

const PROPERTIES = new Set([
  "hidden",
  "disabled",
  "checked",
  "value",
  "open",
  "textContent",
  "className",
  "id",
]);

// make("button", { className: "quiet", onclick: act, "aria-label": "Close" }, icon("close"))
export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (PROPERTIES.has(name)) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const drawn = () => document.querySelector("#icons").namespaceURI;

export function svg(tag, attributes = {}, ...children) {
  const element = document.createElementNS(drawn(), tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

// One of the symbols in the page's sprite.
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));
}

// A button that shows an icon and is named by `label`.
export function iconButton(name, label, action, className = "quiet") {
  const properties = { type: "button", className, "aria-label": label, title: label, onclick: action };
  return make("button", properties, icon(name));
}

export function textButton(text, action, className = "") {
  return make("button", { type: "button", className, onclick: action }, text);
}

// The Clipboard API needs a secure origin; a server reached by http in the local network is none.
export async function copyText(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const field = make("textarea", { value: text, className: "offscreen", "aria-hidden": "true" });
  const focused = document.activeElement;
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused?.focus();
  if (!done) throw new Error("The browser does not allow copying here.");
}

// A button that copies `text()` and confirms it for a moment.
export function copyButton(label, text, className = "quiet") {
  const button = iconButton(
    "copy",
    label,
    async () => {
      try {
        await copyText(text());
        button.replaceChildren(icon("check"));
        announce("Copied");
        setTimeout(() => button.replaceChildren(icon("copy")), 1500);
      } catch (problem) {
        toast(problem.message);
      }
    },
    className,
  );
  return button;
}

// Say something to screen readers.
export function announce(text) {
  const line = make("p", {}, text);
  $("announcer").append(line);
  setTimeout(() => line.remove(), 10000);
}

// A short message at the bottom, with one action if given (such as Undo). -> a function that removes it.
export function toast(text, { action, label, seconds = 6, bad = false } = {}) {
  const box = make("div", { className: bad ? "toast bad" : "toast", role: "status" }, make("span", {}, text));
  const close = () => box.remove();
  if (action) {
    box.append(
      textButton(
        label,
        () => {
          close();
          action();
        },
        "link",
      ),
    );
  }
  box.append(iconButton("close", "Dismiss", close));
  $("toasts").append(box);
  setTimeout(close, seconds * 1000);
  return close;
}

export const count = (number) => Math.round(number).toLocaleString("en-US");

export function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

// 1234567 -> "1.2 M"
export function short(number) {
  for (const [size, unit] of [
    [1e12, "T"],
    [1e9, "B"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (number >= size) return `${+(number / size).toPrecision(3)} ${unit}`;
  }
  return String(+number.toPrecision(3));
}

export function bytes(number) {
  for (const [size, unit] of [
    [1e12, "TB"],
    [1e9, "GB"],
    [1e6, "MB"],
    [1e3, "kB"],
  ]) {
    if (number >= size) return `${+(number / size).toPrecision(3)} ${unit}`;
  }
  return `${number} B`;
}

export function duration(seconds) {
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 100) return `${Math.round(seconds)} s`;
  return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
}

// Not crypto.randomUUID, which needs a secure origin too.
export function newId() {
  const random = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(random, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function download(name, text, media) {
  const url = URL.createObjectURL(new Blob([text], { type: media }));
  const link = make("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

export const isTouch = () => matchMedia("(pointer: coarse)").matches;

// A library that is fetched when it is first needed: the function that this makes calls `act(library)`, and
// tells whether it could do so at once.
export function lazily(fetchIt) {
  let library = null;
  let loading = null;
  const waiting = new Set();
  return (act) => {
    if (library) {
      act(library);
      return true;
    }
    waiting.add(act);
    loading ??= fetchIt().then(
      (module) => {
        library = module.default;
        for (const one of waiting) one(library);
        waiting.clear();
      },
      () => {
        loading = null; // the server is away: the next call tries again
      },
    );
    return false;
  };
}
