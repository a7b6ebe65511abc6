// The empty page: which model this is, and what it can do.

import { make } from "./dom.js";
import { examples, facts, model } from "./model.js";

// `ask(question, fields)` sends an example; the embedded model's run greedily.
export function welcome(ask) {
  const sampling = model.is_embedded ? { temperature: 0 } : {};
  const what = model.is_embedded
    ? "A small model that comes with dsv4, trained for a quarter of an hour. It adds, finds one line among " +
      "hundreds and tells small stories. It knows nothing of the world. The examples run at temperature 0."
    : "Runs on your own server. Conversations stay in this browser.";
  const rows = facts().map(([name, value, kind]) =>
    make("div", { className: kind ?? "" }, make("dt", {}, name), make("dd", {}, value)),
  );
  const cards = examples().map(([title, hint, question]) =>
    make(
      "button",
      { type: "button", className: "example", onclick: () => ask(question, sampling) },
      make("strong", {}, title),
      make("span", {}, hint),
    ),
  );
  return make(
    "section",
    { className: "welcome", "aria-label": "About the model" },
    make("p", { className: "eyebrow" }, "You are talking to"),
    make("h2", {}, model.name || "dsv4"),
    make("p", { className: "lead" }, what),
    rows.length ? make("dl", { className: "facts-list" }, ...rows) : null,
    model.name ? make("div", { className: "examples" }, ...cards) : null,
  );
}
