// Settings: kept in this browser, checked before they are sent, shown beside the model's defaults.

import { key } from "./api.js";
import { $, make, textButton } from "./dom.js";
import { local } from "./local.js";
import { model } from "./model.js";

const NAME = "dsv4.settings";
const THEME = "dsv4.theme";

// name, label, [min, max, step], the default
const NUMBERS = [
  ["temperature", "Temperature", [0, 2, "any"], "1"],
  ["top_p", "Top-p", [0, 1, "any"], "1"],
  ["top_k", "Top-k (0: all)", [0, null, 1], "0"],
  ["min_p", "Min-p", [0, 1, "any"], "0"],
  ["presence_penalty", "Presence penalty", [-2, 2, "any"], "0"],
  ["frequency_penalty", "Frequency penalty", [-2, 2, "any"], "0"],
  ["repetition_penalty", "Repetition penalty", [0.01, 100, "any"], "1"],
  ["seed", "Seed", [null, null, 1], "random"],
  ["max_tokens", "Max tokens", [1, null, 1], "no limit"],
];

const TOOLS_EXAMPLE = `[{"type": "function", "function": {"name": "weather",
  "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}}]`;

export class Wrong extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

let values = {};

function load() {
  try {
    values = JSON.parse(local.get(NAME) || "{}");
  } catch {
    values = {}; // damaged: as if nothing had been set
  }
}

function keep(name, value) {
  if (value === "" || value === null || value === undefined) delete values[name];
  else values[name] = value;
  local.set(NAME, JSON.stringify(values));
}

const LABELS = { tools: "Tools", schema: "JSON schema", logit_bias: "Logit bias" };

function json(name, text) {
  try {
    return JSON.parse(text);
  } catch (problem) {
    throw new Wrong(name, `${LABELS[name]} in Settings: not JSON, ${problem.message}`);
  }
}

export const system = () => (values.system ?? "").trim();
export const echoesTools = () => values.results === "echo";

// What the settings add to a request's body; a Wrong names the field that cannot be sent.
export function fields() {
  const body = {};
  for (const [name, label, [low, high]] of NUMBERS) {
    if (values[name] === undefined) continue;
    const number = Number(values[name]);
    if (!Number.isFinite(number) || (low !== null && number < low) || (high !== null && number > high)) {
      const range = high === null ? `at least ${low}` : `from ${low} to ${high}`;
      throw new Wrong(name, `${label} in Settings is ${values[name]}, expected a number ${range}`);
    }
    body[name] = number;
  }
  const thinking = values.thinking ?? (model.thinking ? "on" : "off");
  body.thinking = { type: thinking === "off" ? "disabled" : "enabled" };
  if (thinking === "max") body.reasoning_effort = "max";
  if (thinking !== "off" && values.budget) body.thinking.budget_tokens = Number(values.budget);
  if ((values.logit_bias ?? "").trim()) body.logit_bias = json("logit_bias", values.logit_bias);
  const stops = (values.stop ?? "").split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  if ((values.tools ?? "").trim()) body.tools = json("tools", values.tools);
  if (values.format === "json") body.response_format = { type: "json_object" };
  if (values.format === "schema") {
    const schema = json("schema", values.schema || "{}");
    body.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
  }
  if (values.logprobs) Object.assign(body, { logprobs: true, top_logprobs: 5 });
  return body;
}

function field(label, input, hint) {
  const box = make("label", { className: "field" }, make("span", {}, label), input);
  if (hint) box.append(make("small", {}, hint));
  return box;
}

function numberField([name, label, [min, max, step], standard]) {
  const input = make("input", {
    id: `set-${name}`,
    type: "number",
    min,
    max,
    step,
    placeholder: model.sampling[name] ?? standard,
    inputmode: "decimal",
    value: values[name] ?? "",
    oninput: () => keep(name, input.value),
  });
  return field(label, input);
}

function areaField(name, label, rows, hint, placeholder) {
  const input = make("textarea", {
    id: `set-${name}`,
    rows,
    placeholder,
    spellcheck: name === "system" ? null : "false",
    className: name === "system" ? "" : "mono",
    value: values[name] ?? "",
    oninput: () => keep(name, input.value),
  });
  return field(label, input, hint);
}

function choiceField(name, label, choices, chosen, change = (value) => keep(name, value)) {
  const input = make(
    "select",
    { id: `set-${name}`, onchange: () => change(input.value) },
    ...choices.map(([value, text]) => make("option", { value }, text)),
  );
  input.value = chosen;
  return field(label, input);
}

function keyField() {
  const input = make("input", {
    id: "set-key",
    type: "password",
    autocomplete: "off",
    value: key.get(),
    placeholder: "from the browser's dialog",
    oninput: () => key.set(input.value.trim()),
  });
  return field("API key", input, "Kept until this tab is closed. Without it, the browser's own dialog asks.");
}

const part = (title, ...children) => make("fieldset", {}, make("legend", {}, title), ...children);

function draw() {
  const thinking = values.thinking ?? (model.thinking ? "on" : "off");
  const budget = numberField([
    "budget",
    "Thinking tokens, at most",
    [1, null, 1],
    model.max_thinking ? String(model.max_thinking) : "no limit",
  ]);
  const logprobs = make("input", {
    id: "set-logprobs",
    type: "checkbox",
    checked: Boolean(values.logprobs),
    onchange: () => keep("logprobs", logprobs.checked || ""),
  });
  $("settings-body").replaceChildren(
    part("Instructions", areaField("system", "System prompt", 3, "Sent before every conversation.")),
    part(
      "Thinking",
      choiceField(
        "thinking",
        "Think before answering",
        [
          ["on", "Yes"],
          ["max", "Yes, with the greatest effort"],
          ["off", "No"],
        ],
        thinking,
      ),
      budget,
    ),
    part(
      "Sampling",
      make("div", { className: "grid" }, ...NUMBERS.map(numberField)),
      make("p", { className: "hint" }, "An empty field uses the model's default, shown in grey."),
      areaField("stop", "Stop texts, one per line", 2),
      areaField("logit_bias", "Logit bias by token id, as JSON", 1, null, '{"42": -100}'),
    ),
    part(
      "Answers",
      choiceField(
        "format",
        "Format",
        [
          ["", "Text"],
          ["json", "A JSON object"],
          ["schema", "JSON of a schema"],
        ],
        values.format ?? "",
      ),
      areaField("schema", "JSON schema", 3, null, '{"type": "object"}'),
      make(
        "label",
        { className: "check" },
        logprobs,
        "Ask for log-probabilities (a Tokens button shows them)",
      ),
    ),
    part(
      "Tools",
      areaField("tools", "Tools, as a JSON list", 4, null, TOOLS_EXAMPLE),
      choiceField(
        "results",
        "Tool results",
        [
          ["hand", "I enter them"],
          ["echo", "Echo the arguments"],
        ],
        values.results ?? "hand",
      ),
    ),
    part(
      "This page",
      choiceField(
        "theme",
        "Colours",
        [
          ["", "As the system"],
          ["light", "Light"],
          ["dark", "Dark"],
        ],
        local.get(THEME),
        setTheme,
      ),
      keyField(),
      textButton(
        "Reset all settings",
        () => {
          values = {};
          local.set(NAME, "");
          setTheme("");
          key.set("");
          draw();
        },
        "danger",
      ),
    ),
  );
}

export function setTheme(theme) {
  local.set(THEME, theme);
  if (theme) document.documentElement.dataset.theme = theme;
  else delete document.documentElement.dataset.theme;
}

export function openSettings(name) {
  draw();
  if (!$("settings").open) $("settings").showModal();
  const target = name && $(`set-${name}`);
  if (target) {
    target.focus();
    target.scrollIntoView({ block: "center" });
  }
}

export function startSettings() {
  load();
  $("settings-toggle").addEventListener("click", () => openSettings());
}
