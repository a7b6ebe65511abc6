// The tokens of an answer with their probabilities: colour tells how sure, hovering shows the alternatives.

import { make } from "./dom.js";

const percent = (logprob) => {
  const share = 100 * Math.exp(logprob);
  return share >= 0.1 ? `${share.toFixed(1)} %` : "< 0.1 %";
};

const visible = (text) => text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ | $/g, "␣") || "∅";

function sureness(logprob) {
  const share = Math.exp(logprob);
  return share > 0.9 ? "" : share > 0.5 ? "likely" : share > 0.1 ? "unsure" : "unlikely";
}

// `entries`: [token, logprob, [[token, logprob], …]]
export function tokensView(entries) {
  const card = make(
    "div",
    { className: "token-card", role: "status" },
    "Hover a token, or move with the arrow keys, to see what else it could have been.",
  );
  const show = (entry) => {
    const rows = entry[2].length ? entry[2] : [[entry[0], entry[1]]];
    card.replaceChildren(
      make(
        "table",
        {},
        make(
          "tbody",
          {},
          ...rows.map(([token, logprob]) => {
            const bar = make("meter", {
              min: "0",
              max: "1",
              value: Math.exp(logprob),
              "aria-hidden": "true",
            });
            return make(
              "tr",
              { className: token === entry[0] ? "chosen" : "" },
              make("td", {}, make("code", {}, visible(token))),
              make("td", {}, bar),
              make("td", {}, percent(logprob)),
            );
          }),
        ),
      ),
    );
  };
  const spans = entries.map((entry, at) =>
    make(
      "span",
      {
        className: `token ${sureness(entry[1])}`,
        tabindex: at ? "-1" : "0",
        "data-at": at,
        title: `${visible(entry[0])} ${percent(entry[1])}`,
      },
      entry[0],
    ),
  );
  const text = make("div", { className: "tokens text" }, ...spans);
  const enter = (event) => {
    const span = event.target.closest(".token");
    if (span) show(entries[Number(span.dataset.at)]);
  };
  text.addEventListener("mouseover", enter);
  text.addEventListener("focusin", enter);
  text.addEventListener("click", enter);
  text.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const next = step && spans[Number(event.target.dataset.at) + step];
    if (!next) return;
    event.preventDefault();
    event.target.tabIndex = -1;
    next.tabIndex = 0;
    next.focus();
  });
  return make("div", { className: "token-view" }, card, text);
}
