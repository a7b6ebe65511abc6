// Requests to the server that gave the page: the key, errors in words, events of a stream, metrics.

import { session } from "./local.js";

const KEY = "dsv4.key";

// The key entered in Settings lasts until the tab is closed. Without one the browser sends its own dialog's.
export const key = {
  get: () => session.get(KEY),
  set: (value) => session.set(KEY, value),
};

export class Refused extends Error {
  constructor(message, status = 0, answer = {}) {
    super(message);
    this.status = status;
    this.answer = answer;
  }
}

// `id`: a name for the request, by which its place in the queue can be asked for.
export async function ask(path, { body, signal, id } = {}) {
  const headers = id ? { "X-Request-Id": id } : {};
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const options = { method: body === undefined ? "GET" : "POST", headers, signal, cache: "no-store" };
  if (body !== undefined) options.body = JSON.stringify(body);
  let response;
  try {
    response = await fetch(path, options);
  } catch (problem) {
    if (problem.name === "AbortError") throw problem;
    throw new Refused("The server cannot be reached. Is it running?");
  }
  if (response.ok) return response;
  const answer = await response.json().catch(() => ({}));
  const said = answer.error?.message ?? `The server answered with status ${response.status}.`;
  const message =
    response.status === 401
      ? "The server refused the API key: it is missing, wrong or expired. Enter another one in Settings."
      : said;
  throw new Refused(message, response.status, answer);
}

export const get = async (path) => (await ask(path)).json();

// The JSON objects of a stream of server-sent events.
export async function* events(response) {
  // Not a TextDecoderStream: its pipe took 9 % of a core at 250 tokens/s.
  const reader = response.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((problem) => {
        if (problem.name === "AbortError") throw problem;
        return { done: true }; // the connection broke; the caller misses the end
      });
      if (done) return;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part
          .split("\n")
          .filter((line) => line.startsWith("data:"))
          .map((line) => line.slice(5));
        if (!data.length) continue; // a comment: the answer is still to come
        const text = data.join("\n").trim();
        if (text === "[DONE]") return;
        yield JSON.parse(text);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Prometheus's text to a Map: name -> [{ labels, value }].
export function parseMetrics(text) {
  const found = new Map();
  for (const line of text.split("\n")) {
    const match = /^([\w:]+)(?:\{(.*)\})? (\S+)/.exec(line);
    if (!match) continue;
    const labels = Object.fromEntries(
      [...(match[2] ?? "").matchAll(/(\w+)="((?:[^"\\]|\\.)*)"/g)].map(([, name, value]) => [name, value]),
    );
    const value = match[3] === "+Inf" ? Infinity : Number(match[3]);
    found.set(match[1], [...(found.get(match[1]) ?? []), { labels, value }]);
  }
  return found;
}

export async function metrics() {
  return parseMetrics(await (await ask("/metrics")).text());
}

// Sum over labels, or null where the metric is missing. Those of the process have no prefix.
export function total(found, name) {
  const samples = found.get(`dsv4_${name}`) ?? found.get(name);
  return samples ? samples.reduce((sum, sample) => sum + sample.value, 0) : null;
}
