// What the server tells about itself: the model's facts, whether it is loaded, what requests may ask for.

import { ask, get } from "./api.js";
import { bytes, count, short } from "./dom.js";

const POLL_MS = 700;

export const model = {
  name: "",
  context: null,
  thinking: true,
  max_thinking: null,
  is_embedded: false,
  sampling: {}, // the model's own defaults, where the server reports them
  hasProgress: false, // whether requests may ask for `return_progress`
};

// Wait until the model is loaded, calling `tell({ phase, fraction })`. Never gives up: servers come back.
export async function untilReady(tell) {
  for (;;) {
    try {
      await ask("/ready");
      return;
    } catch (problem) {
      tell({ ...(problem.answer ?? {}), message: problem.message, status: problem.status ?? 0 });
      await new Promise((resolve) => setTimeout(resolve, POLL_MS));
    }
  }
}

export async function loadFacts() {
  Object.assign(model, await get("/page/about"));
  const list = await get("/v1/models");
  model.sampling = list.data[0].sampling_defaults ?? {};
  const api = await get("/openapi.json");
  const body = api.components?.schemas?.ChatBody?.properties ?? {};
  model.hasProgress = "return_progress" in body;
}

const STORAGE = { nvfp4: "NVFP4", mxfp4: "MXFP4", fp8: "FP8", bf16: "BF16", f32: "FP32" };

// Facts: [name, value, "minor" where a small screen leaves it out], for the empty page and the status page.
export function facts() {
  const formats = (model.formats ?? []).map((name) => STORAGE[name] ?? name);
  const found = [];
  if (model.parameters) found.push(["Size", `${short(model.parameters)} parameters`]);
  if (formats.length) found.push(["Format", formats.slice(0, 2).join(" + ")]);
  if (model.bytes) found.push(["On disk", bytes(model.bytes), "minor"]);
  if (model.layers) found.push(["Layers", count(model.layers), "minor"]);
  if (model.experts)
    found.push(["Experts", `${model.experts_per_token} of ${model.experts} per token`, "minor"]);
  if (model.context) found.push(["Context", `${count(model.context)} tokens`]);
  return found;
}

const NAMES = [
  "Freya",
  "Oskar",
  "Imogen",
  "Dario",
  "Gita",
  "Pavel",
  "Magnus",
  "Siobhan",
  "Bjorn",
  "Eamon",
  "Kenji",
  "Niamh",
  "Ivo",
  "Candy",
  "Dmitri",
  "Bella",
];
const FOODS = ["pasta", "cheese", "apples", "soup", "rice", "bread", "beans", "plums"];

function recall() {
  const lines = NAMES.map((name, at) => `${name} likes to eat ${FOODS[(at * 3 + 1) % FOODS.length]}.`);
  return `Remember these lines.\n\n${lines.join("\n")}\n\nWhat does Imogen like to eat?`;
}

// Questions that the model can really answer: [title, what it shows, question].
export function examples() {
  if (model.is_embedded) {
    return [
      ["Add two numbers", "It works the sum out first, digit by digit.", "What is 27 + 58?"],
      ["Tell a story", "An outline in its thought, then the story.", "Tell me a short story about a rabbit."],
      ["Find one line", "Sixteen lines to read, one to find.", recall()],
      ["Sort numbers", "Small to large.", "Order from small to large: 2, 6, 4, 11, 8, 1"],
    ];
  }
  return [
    [
      "Explain",
      "With a formula and a table.",
      "Explain how compound interest works. Show the formula, and a table for 1000 at 4 % over five years.",
    ],
    [
      "Write code",
      "Highlighted, with a copy button.",
      "Write a Python function that merges overlapping intervals, with a short test.",
    ],
    [
      "Think it through",
      "Its thought is folded above the answer.",
      "Three boxes are labelled apples, oranges and both. All labels are wrong. From which box do I draw " +
        "one fruit to label all three correctly, and why?",
    ],
    [
      "Structure",
      "As a table.",
      "Compare TCP, UDP and QUIC in a table: ordering, loss, setup, typical uses.",
    ],
  ];
}
