// One answer on its way: sends the request, fills the turn, keeps it, reports to `changed`.

import { ask, events, get, Refused } from "./api.js";
import { newId } from "./dom.js";

const SAVE_MS = 500;
const QUEUE_MS = 1000;
const LEAVING_MS = 200;

export class Run {
  // `changed(what, value)` is in turn-view.js.
  constructor(conversation, turn, body) {
    Object.assign(this, { conversation, turn, body });
    this.changed = () => {};
    this.controller = new AbortController();
    this.began = performance.now();
    this.phase = "sent";
    this.progress = null;
    this.ahead = null; // requests that begin earlier, while this one waits
    this.num = { reasoning: 0, content: 0 };
    this.firstAt = this.thoughtAt = null;
    this.savedAt = 0;
  }

  get seconds() {
    return (performance.now() - this.began) / 1000;
  }

  get thinkingSeconds() {
    return this.thoughtAt === null ? 0 : ((this.answerAt ?? performance.now()) - this.thoughtAt) / 1000;
  }

  // Tokens per second since the first one.
  get speed() {
    const tokens = this.num.reasoning + this.num.content;
    const seconds = this.firstAt === null ? 0 : (performance.now() - this.firstAt) / 1000;
    return tokens > 1 && seconds > 0.2 ? (tokens - 1) / seconds : null;
  }

  // `active`: other tabs see that the answer goes on.
  save() {
    this.turn.active = this.isLeaving ? 0 : Date.now();
    return this.conversation.save(this.turn);
  }

  stop() {
    this.controller.abort();
  }

  async work() {
    const { turn } = this;
    delete turn.error;
    delete turn.finish;
    delete turn.stopped;
    delete turn.status;
    this.save();
    const { body } = this;
    const id = newId();
    const watcher = setInterval(() => this.watchQueue(id), QUEUE_MS);
    try {
      const response = await ask("/v1/chat/completions", { body, id, signal: this.controller.signal });
      this.enter("reading");
      for await (const chunk of events(response)) this.take(chunk);
      if (!turn.finish) throw new Refused("The connection ended before the answer did.");
    } catch (problem) {
      const isStopped = problem.name === "AbortError";
      // A page that is closed loses its connections, in Firefox before it hears of it: no error.
      if (!isStopped) await new Promise((resolve) => setTimeout(resolve, LEAVING_MS));
      if (this.isLeaving) turn.active = 0;
      else if (isStopped) turn.stopped = true;
      else {
        turn.error = problem.message;
        turn.status = problem.status;
      }
    }
    clearInterval(watcher);
    if (this.thoughtAt !== null) {
      Object.assign(turn, { thinkingSeconds: this.thinkingSeconds, thinkingTokens: this.num.reasoning });
    }
    if (this.speed) turn.speed = this.speed;
    this.phase = "over";
    delete turn.active;
    await this.conversation.save(turn);
  }

  enter(phase) {
    if (this.phase === phase) return;
    this.phase = phase;
    this.ahead = null;
    this.changed("phase", phase);
  }

  // Before the answer begins, show the place in the queue.
  async watchQueue(id) {
    if (this.phase !== "sent") return;
    try {
      const { ahead } = await get(`/page/queue?id=${id}`);
      if (this.phase !== "sent") return;
      this.ahead = ahead;
      this.changed("phase", this.phase);
    } catch {
      // The request itself will tell what is wrong with the server.
    }
  }

  take(chunk) {
    if (chunk.error) throw new Refused(chunk.error.message);
    const { turn } = this;
    if (chunk.usage) turn.usage = chunk.usage;
    if (chunk.timings) turn.timings = chunk.timings;
    if (chunk.prompt_progress) {
      this.progress = chunk.prompt_progress;
      this.changed("progress", this.progress);
    }
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { delta = {}, logprobs, finish_reason: finish } = choice;
    if (delta.reasoning_content) this.takeReasoning(delta.reasoning_content);
    if (delta.content) this.takeContent(delta.content);
    for (const call of delta.tool_calls ?? []) this.takeCall(call);
    for (const entry of logprobs?.content ?? []) {
      const top = (entry.top_logprobs ?? []).map((one) => [one.token, one.logprob]);
      (turn.logprobs ??= []).push([entry.token, entry.logprob, top]);
    }
    if (finish) turn.finish = finish;
    if (performance.now() - this.savedAt > SAVE_MS) {
      this.savedAt = performance.now();
      this.save();
    }
  }

  takeReasoning(text) {
    this.thoughtAt ??= performance.now();
    this.firstAt ??= performance.now();
    this.num.reasoning += 1;
    this.turn.reasoning = (this.turn.reasoning ?? "") + text;
    this.enter("thinking");
    this.changed("reasoning", text);
  }

  takeContent(text) {
    this.firstAt ??= performance.now();
    this.answerAt ??= performance.now();
    this.num.content += 1;
    this.turn.content += text;
    this.enter("answering");
    this.changed("content", text);
  }

  // The first piece of a call has its id and name, the others have more of its arguments.
  takeCall({ index, ...call }) {
    this.firstAt ??= performance.now();
    this.answerAt ??= performance.now();
    this.num.content += 1;
    const calls = (this.turn.calls ??= []);
    if (calls[index]) calls[index].function.arguments += call.function?.arguments ?? "";
    else calls[index] = { id: call.id, type: "function", function: { arguments: "", ...call.function } };
    this.enter("answering");
    this.changed("call", index);
  }
}
