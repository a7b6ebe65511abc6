// The status page: what /metrics tells, drawn every second. Measurements that a server lacks have no card.

import { metrics, total } from "./api.js";
import { $, bytes, count, duration, make, plural, svg } from "./dom.js";
import { facts, loadFacts, model } from "./model.js";

const POLL_MS = 1000;
const KEPT = 120; // samples

const samples = []; // { time, found }

// What is drawn -> its metric, without the prefix.
const NAMES = {
  running: "num_requests_running",
  waiting: "num_requests_waiting",
  generated: "generation_tokens_total",
  // Counted at every token; the totals grow when an answer ends.
  live: "inter_token_latency_seconds_count",
  prompt: "prompt_tokens_total",
  cached: "prefix_cache_hits_total",
  free: "cache_pages_free",
  kept: "cache_pages_kept",
  pages: "cache_pages",
  pauses: "num_preemptions_total",
  drafted: "spec_decode_num_draft_tokens_total",
  accepted: "spec_decode_num_accepted_tokens_total",
  steps: "spec_decode_num_steps_total",
  stepTokens: "spec_decode_num_tokens_total",
  restarts: "engine_restarts_total",
  ready: "engine_ready",
  gpuUsed: "gpu_memory_used_bytes",
  gpuTotal: "gpu_memory_total_bytes",
  hostUsed: "host_memory_used_bytes",
  hostTotal: "host_memory_total_bytes",
  http: "process_resident_memory_bytes",
  hits: "expert_hits_total",
  misses: "expert_misses_total",
};
const FIRST = "time_to_first_token_seconds";
const BETWEEN = "inter_token_latency_seconds";
const DONE = "requests_total";

const value = (name, sample = samples.at(-1)) => total(sample.found, NAMES[name]);

// Growth per second over the last `seconds`.
function rate(name, seconds, end = samples.length - 1) {
  const last = samples[end];
  let from = end;
  while (from > 0 && last.time - samples[from].time < seconds) from -= 1;
  const [now, then] = [value(name, last), value(name, samples[from])];
  const passed = last.time - samples[from].time;
  return now === null || then === null || passed <= 0 ? null : Math.max(0, now - then) / passed;
}

function buckets(sample, name) {
  const sums = new Map();
  for (const { labels, value } of sample.found.get(`dsv4_${name}_bucket`) ?? []) {
    const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
    sums.set(bound, (sums.get(bound) ?? 0) + value);
  }
  return [...sums].sort((a, b) => a[0] - b[0]);
}

// A quantile of what was counted between two samples, within a bucket by a straight line.
function quantile(name, share, from) {
  const now = buckets(samples.at(-1), name);
  if (!now.length) return null;
  const then = new Map(from ? buckets(from, name) : []);
  const counts = now.map(([bound, value]) => [bound, value - (then.get(bound) ?? 0)]);
  const all = counts.at(-1)[1];
  if (all <= 0) return null;
  let low = 0,
    before = 0;
  for (const [bound, sum] of counts) {
    if (sum >= share * all) {
      if (bound === Infinity) return low;
      return low + ((bound - low) * (share * all - before)) / (sum - before || 1);
    }
    [low, before] = [bound, sum];
  }
  return low;
}

// Drawing.

function sparkline(values, label) {
  const most = Math.max(...values, 1e-9);
  const step = 100 / (Math.max(30, values.length) - 1);
  const first = 100 - step * (values.length - 1);
  const points = values.map(
    (each, at) => `${(first + at * step).toFixed(2)},${(30 - (28 * each) / most).toFixed(2)}`,
  );
  const line = points.join(" ");
  return svg(
    "svg",
    {
      viewBox: "0 0 100 30",
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `${label}, last two minutes, at most ${short(most)}`,
    },
    svg("polygon", { class: "area", points: `${first},30 ${line} 100,30` }),
    svg("polyline", { class: "line", points: line }),
  );
}

const short = (number) =>
  number >= 100 || number === 0 ? count(number) : number.toFixed(number >= 10 ? 1 : 2);
const ms = (seconds) =>
  seconds === null ? "–" : seconds < 1 ? `${Math.round(1000 * seconds)} ms` : duration(seconds);
const big = (text, unit) => make("div", { className: "big" }, text, " ", make("small", {}, unit));
const rows = (pairs) =>
  make(
    "dl",
    {},
    ...pairs
      .filter(([, text]) => text !== null)
      .map(([name, text]) => make("div", {}, make("dt", {}, name), make("dd", {}, text))),
  );
const card = (title, ...children) =>
  make("section", { className: "card" }, make("h2", {}, title), ...children);

function bar(name, used, all, text) {
  return make(
    "div",
    { className: "bar" },
    make("span", {}, name, make("span", {}, text)),
    make("meter", { min: "0", max: "1", value: all ? used / all : 0, "aria-label": `${name}: ${text}` }),
  );
}

const history = (name) => samples.map((sample) => value(name, sample) ?? 0);
const rates = (name) => samples.map((_, at) => rate(name, 2, at) ?? 0);

function requests() {
  const [running, waiting] = [value("running"), value("waiting")];
  if (running === null) return null;
  return card(
    "Requests",
    make("div", { className: "pair" }, big(count(running), "running"), big(count(waiting ?? 0), "waiting")),
    sparkline(history("running"), "Running requests"),
    rows([
      ["Places", model.max_batch ? count(model.max_batch) : null],
      ["Paused for want of pages", value("pauses") === null ? null : count(value("pauses"))],
    ]),
  );
}

function speed() {
  if (value("generated") === null) return null;
  return card(
    "Generation",
    big(short(rate("live", 3) ?? 0), "tokens/s"),
    sparkline(rates("live"), "Generated tokens per second"),
    rows([
      ["Since the start", `${count(value("generated"))} tokens`],
      ["Between tokens, median", ms(quantile(BETWEEN, 0.5))],
      ["Between tokens, 99 %", ms(quantile(BETWEEN, 0.99))],
    ]),
  );
}

function prompts() {
  const [read, cached] = [value("prompt"), value("cached")];
  if (read === null) return null;
  const share = read && cached !== null ? `${((100 * cached) / read).toFixed(1)} %` : null;
  return card(
    "Prompts",
    big(short(rate("prompt", 10) ?? 0), "tokens/s"),
    sparkline(rates("prompt"), "Prompt tokens per second"),
    rows([
      ["Since the start", `${count(read)} tokens`],
      ["From the prefix cache", share],
    ]),
  );
}

function first() {
  const half = quantile(FIRST, 0.5, samples[0]) ?? quantile(FIRST, 0.5);
  return card(
    "Time to first token",
    big(ms(half), "median"),
    rows([
      ["90 % within", ms(quantile(FIRST, 0.9))],
      ["99 % within", ms(quantile(FIRST, 0.99))],
    ]),
  );
}

function memory() {
  const bars = [];
  const [pages, free, kept] = [value("pages"), value("free"), value("kept") ?? 0];
  if (pages) {
    bars.push(
      bar("Cache pages in use", pages - free, pages, `${count(pages - free)} of ${count(pages)}`),
      bar("Kept for prefixes", kept, pages, plural(kept, "page")),
    );
  }
  for (const [name, part] of [
    ["GPU memory", "gpu"],
    ["Host memory", "host"],
  ]) {
    const [used, all] = [value(`${part}Used`), value(`${part}Total`)];
    if (used !== null && all) bars.push(bar(name, used, all, `${bytes(used)} of ${bytes(all)}`));
    else if (used !== null) bars.push(rows([[name, bytes(used)]]));
  }
  if (value("http") !== null) bars.push(rows([["HTTP process", bytes(value("http"))]]));
  return bars.length ? card("Memory", ...bars) : null;
}

// Of drafts whose predecessors in the step were right, the share that was right too.
function byPosition() {
  const read = (name) =>
    samples.at(-1).found.get(`dsv4_spec_decode_num_${name}_tokens_per_pos_total`) ?? [];
  const right = new Map(read("accepted").map(({ labels, value }) => [labels.position, value]));
  return read("draft")
    .filter(({ value }) => value)
    .map(({ labels, value }) => `${Math.round((100 * (right.get(labels.position) ?? 0)) / value)} %`)
    .join(", ");
}

function shares() {
  const [hits, misses] = [value("hits"), value("misses")];
  const [drafted, accepted] = [value("drafted"), value("accepted")];
  const bars = [];
  if (hits !== null && hits + misses > 0) {
    bars.push(
      bar(
        "Chosen experts on the GPU",
        hits,
        hits + misses,
        `${((100 * hits) / (hits + misses)).toFixed(1)} %`,
      ),
    );
  }
  if (drafted) {
    bars.push(bar("Drafts accepted", accepted, drafted, `${((100 * accepted) / drafted).toFixed(1)} %`));
    const [steps, tokens] = [value("steps"), value("stepTokens")];
    const lines = [["By position", byPosition()]];
    if (steps) lines.push(["Tokens per step", (tokens / steps).toFixed(2)]);
    bars.push(rows(lines));
  }
  return bars.length ? card("Hits", ...bars) : null;
}

function outcomes() {
  const all = samples.at(-1).found.get(`dsv4_${DONE}`) ?? [];
  const byStatus = new Map();
  for (const { labels, value } of all)
    byStatus.set(labels.status, (byStatus.get(labels.status) ?? 0) + value);
  const failed = [...byStatus].filter(([status]) => Number(status) >= 400);
  const errors = failed.reduce((sum, [, value]) => sum + value, 0);
  const words = {
    400: "bad request",
    401: "no key",
    404: "not found",
    429: "queue full",
    499: "client left",
    500: "server error",
    503: "not ready",
    504: "timeout",
  };
  return card(
    "Errors",
    big(count(errors), "requests failed"),
    rows([
      ...failed.map(([status, value]) => [`${status} ${words[status] ?? ""}`, count(value)]),
      ["Engine restarts", value("restarts") === null ? null : count(value("restarts"))],
    ]),
  );
}

function draw() {
  const about = facts();
  const cards = [
    requests(),
    speed(),
    first(),
    prompts(),
    memory(),
    shares(),
    outcomes(),
    about.length ? card("Model", rows([["Name", model.name], ...about])) : null,
  ];
  $("cards").replaceChildren(...cards.filter(Boolean));
}

function tell(text, kind) {
  if ($("state").textContent !== text) $("state").textContent = text;
  $("state").className = kind;
}

async function poll() {
  try {
    const found = await metrics();
    samples.push({ time: performance.now() / 1000, found });
    if (samples.length > KEPT) samples.shift();
    const isReady = value("ready") !== 0;
    tell(isReady ? "Ready" : "The model is not loaded", isReady ? "good" : "bad");
    if (isReady && !model.name) await loadFacts();
    $("model").textContent = model.name || "dsv4";
    draw();
  } catch (problem) {
    tell(problem.message, "bad");
  }
  setTimeout(poll, POLL_MS);
}

poll();
