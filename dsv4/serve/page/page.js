// The chat page. Whatever a model or a user wrote enters the page as textContent, never as HTML.
"use strict";

const $ = (id) => document.getElementById(id);
const saved = ["temperature", "max-tokens", "thinking", "system", "tools"];
let messages = [];   // what was said, as the API wants it; the system text is added when sent. Never changed in place
let running = null;  // the AbortController of the answer that is coming

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

function button(text, action) {
  const element = make("button", "", text);
  element.type = "button";
  element.addEventListener("click", action);
  return element;
}

function loadSettings() {
  for (const id of saved) {
    const value = localStorage.getItem("dsv4." + id);
    const field = $(id);
    if (value !== null) field.type === "checkbox" ? (field.checked = value === "true") : (field.value = value);
    field.addEventListener("change", () =>
      localStorage.setItem("dsv4." + id, field.type === "checkbox" ? field.checked : field.value));
  }
}

function requestBody() {
  const system = $("system").value.trim();
  const body = {
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    thinking: { type: $("thinking").checked ? "enabled" : "disabled" },
    stream: true,
    stream_options: { include_usage: true },
  };
  if ($("temperature").value) body.temperature = Number($("temperature").value);
  if ($("max-tokens").value) body.max_tokens = Number($("max-tokens").value);
  if ($("tools").value.trim()) body.tools = tools();
  return body;
}

function tools() {
  try {
    return JSON.parse($("tools").value);
  } catch (problem) {
    throw new Error("Tools in Settings are not JSON: " + problem.message);
  }
}

// One answer on the page, filled as it arrives.
class Answer {
  constructor() {
    this.message = { role: "assistant", content: "" };
    this.element = make("div", "turn assistant");
    this.reasoning = make("div", "text");
    this.details = make("details");
    this.details.append(make("summary", "", "Thinking"), this.reasoning);
    this.details.hidden = true;
    this.content = make("div", "text content");
    this.calls = make("div");
    this.foot = make("div", "foot");
    this.element.append(this.details, this.content, this.calls, this.foot);
    $("talk").append(this.element);
    this.began = performance.now();
    this.first = null;
  }

  take(chunk) {
    if (chunk.error) throw new Error(chunk.error.message);
    if (chunk.usage) this.usage = chunk.usage;
    const choice = chunk.choices && chunk.choices[0];
    if (!choice) return;
    const delta = choice.delta;
    if (this.first === null && (delta.content || delta.reasoning_content)) this.first = performance.now();
    if (delta.reasoning_content) {
      this.message.reasoning_content = (this.message.reasoning_content || "") + delta.reasoning_content;
      this.details.hidden = false;
      this.reasoning.append(delta.reasoning_content);
    }
    if (delta.content) {
      this.message.content += delta.content;
      this.content.append(delta.content);
    }
    for (const call of delta.tool_calls || []) this.addCall(call);
    if (choice.finish_reason) this.finish = choice.finish_reason;
  }

  // The first piece of a call has its id and name, the others have more of its arguments.
  addCall({ index, ...call }) {
    const known = (this.message.tool_calls = this.message.tool_calls || []);
    if (known[index]) {
      known[index].function.arguments += call.function.arguments;
      this.calls.children[index].querySelector("pre").append(call.function.arguments);
      return;
    }
    known[index] = call;
    const box = make("div", "call");
    const result = make("input");
    result.placeholder = "Its result";
    result.setAttribute("aria-label", "Result of " + call.function.name);
    result.dataset.call = call.id;
    box.append(make("span", "name", call.function.name), make("pre", "", call.function.arguments), result);
    this.calls.append(box);
  }

  end(error) {
    const seconds = (performance.now() - (this.first || this.began)) / 1000;
    this.foot.replaceChildren();
    if (error) this.element.insertBefore(make("div", "error", error), this.foot);
    if (this.usage) {
      const { completion_tokens: count, prompt_tokens: prompt, prompt_tokens_details: of } = this.usage;
      const speed = count > 1 && this.first ? ((count - 1) / seconds).toFixed(1) : "–";
      const cached = of ? of.cached_tokens : 0;
      this.foot.append(make("span", "speed", `${count} tokens, ${speed} tokens/s`));
      this.foot.append(make("span", "cached", `prompt ${prompt}, cached ${cached}`));
    }
    if (this.finish === "length") this.foot.append(make("span", "", "cut: the limit of tokens is reached"));
    if (!this.finish && !error) this.foot.append(make("span", "", "stopped"));
    this.foot.append(button("Retry", () => retry(this)));
    if (this.message.tool_calls) this.foot.append(button("Send results", () => sendResults(this)));
  }
}

async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) {
      if (part.startsWith(":")) continue;  // a comment: the answer is still to come
      const data = part.replace(/^data: /, "");
      if (data === "[DONE]") return;
      yield JSON.parse(data);
    }
  }
}

// `asked`: what is added to the conversation. It stays there only if it is answered, so that a question which failed
// is not sent again with the next one.
async function answer(asked) {
  const shown = new Answer();
  const talk = $("talk");
  const conversation = [...messages, ...asked];
  Object.assign(shown, { before: messages, asked });
  messages = conversation;
  const mine = (running = new AbortController());
  setBusy(true);
  let error = "";
  try {
    const response = await fetch("v1/chat/completions", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify(requestBody()),
      signal: mine.signal,
    }).catch((problem) => {
      throw problem.name === "AbortError" ? problem : new Error("The server cannot be reached; is it running?");
    });
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const chunk of events(response.body)) {
      const follows = talk.scrollHeight - talk.scrollTop - talk.clientHeight < 60;
      shown.take(chunk);
      if (follows) talk.scrollTop = talk.scrollHeight;
    }
    if (!shown.finish) throw new Error("The connection ended before the answer did.");
  } catch (problem) {
    if (problem.name !== "AbortError") error = problem.message;
  }
  if (messages !== conversation) return;  // another conversation has begun
  running = null;
  setBusy(false);
  shown.end(error);
  talk.scrollTop = talk.scrollHeight;
  const isAnswer = !error && (shown.message.content || shown.message.tool_calls);
  messages = isAnswer ? [...conversation, shown.message] : shown.before;
}

function retry(shown) {
  if (running) return;
  messages = shown.before;
  while (shown.element.nextSibling) shown.element.nextSibling.remove();
  shown.element.remove();
  answer(shown.asked);
}

function sendResults(shown) {
  if (running || messages[messages.length - 1] !== shown.message) return;
  const results = [];
  for (const field of shown.calls.querySelectorAll("input")) {
    results.push({ role: "tool", tool_call_id: field.dataset.call, content: field.value });
    field.disabled = true;
  }
  answer(results);
}

function setBusy(busy) {
  $("send").hidden = busy;
  $("stop").hidden = !busy;
}

function fit() {
  const field = $("question");
  field.style.height = "auto";
  field.style.height = field.scrollHeight + field.offsetHeight - field.clientHeight + "px";
}

function send(event) {
  event.preventDefault();
  const text = $("question").value.trim();
  if (!text || running) return;
  $("question").value = "";
  fit();
  const bubble = make("div", "turn user");
  bubble.append(make("div", "text", text));
  $("talk").append(bubble);
  answer([{ role: "user", content: text }]);
}

$("ask").addEventListener("submit", send);
$("question").addEventListener("input", fit);
$("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
});
$("stop").addEventListener("click", () => running && running.abort());
$("new").addEventListener("click", () => {
  if (running) running.abort();
  running = null;
  setBusy(false);
  messages = [];
  $("talk").replaceChildren();
  $("question").focus();
});
$("settings").addEventListener("submit", (event) => event.preventDefault());
$("settings-toggle").addEventListener("click", () => {
  const open = $("settings").hidden;
  $("settings").hidden = !open;
  $("settings-toggle").setAttribute("aria-expanded", String(open));
});
loadSettings();
fetch("v1/models").then((response) => response.json()).then((list) => {
  $("model").textContent = document.title = list.data[0].id;
}).catch(() => {});
