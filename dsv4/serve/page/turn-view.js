// Turns on the page. A view changes only what is new: `AnswerView.change` takes what a Run reports.

import { copyButton, count, duration, icon, iconButton, make, plural, textButton } from "./dom.js";
import { questionText } from "./conversation.js";
import { fileCard } from "./files.js";
import { Rendering, rendered } from "./rendering.js";
import { Speaker } from "./speaker.js";
import { tokensView } from "./tokens-view.js";
import { looksStructured, pretty, ToolCard } from "./tool-card.js";

const TICK_MS = 250;
const ACTIVE_MS = 3000;

// `acts`: what buttons do, see chat.js.
function branches(turn, acts) {
  const [at, all] = acts.place(turn);
  if (all.length < 2) return null;
  const move = (step) => acts.pick(all[at + step], step);
  const back = iconButton("left", "Previous version", () => move(-1));
  const next = iconButton("right", "Next version", () => move(1));
  back.disabled = at === 0;
  next.disabled = at === all.length - 1;
  return make(
    "span",
    { className: "branches" },
    back,
    make("span", { "aria-label": `Version ${at + 1} of ${all.length}` }, `${at + 1}/${all.length}`),
    next,
  );
}

const deleteButton = (turn, acts) =>
  iconButton("trash", "Delete, with what follows", () => acts.remove(turn));

class TurnView {
  constructor(turn, acts, className, label) {
    Object.assign(this, { turn, acts });
    const heading = make("h2", { className: "offscreen" }, label);
    this.element = make(
      "article",
      { className: `turn ${className}`, "aria-label": label, tabindex: "-1" },
      heading,
    );
    this.foot = make("div", { className: "foot" });
  }
}

export class QuestionView extends TurnView {
  constructor(turn, acts) {
    super(turn, acts, "user", "You");
    const cards = (turn.files ?? []).map((file) => fileCard(file));
    this.text = make("div", { className: "bubble text" }, turn.content);
    this.text.hidden = !turn.content;
    if (cards.length) this.element.append(make("div", { className: "cards" }, ...cards));
    this.element.append(this.text, this.foot);
  }

  refresh() {
    const { turn, acts } = this;
    this.edit = iconButton("edit", "Edit", () => this.startEdit());
    const buttons = [
      branches(turn, acts),
      copyButton("Copy question", () => questionText(turn)),
      this.edit,
      deleteButton(turn, acts),
    ].filter(Boolean);
    for (const button of buttons.slice(-2)) button.disabled = acts.isBusy();
    this.foot.replaceChildren(...buttons);
  }

  startEdit() {
    const { turn, acts } = this;
    const field = make("textarea", {
      className: "edit",
      value: turn.content,
      "aria-label": "Edit your question",
    });
    const end = () => {
      form.replaceWith(this.text);
      this.foot.hidden = false;
      this.edit.focus();
    };
    const send = (event) => {
      event?.preventDefault();
      if (!field.value.trim() && !turn.files?.length) return;
      form.replaceWith(this.text);
      this.foot.hidden = false;
      acts.edit(turn, field.value);
    };
    const form = make(
      "form",
      { className: "edit-form", onsubmit: send },
      field,
      make(
        "div",
        { className: "row" },
        make("span", { className: "hint" }, "What followed is kept as a version."),
        textButton("Cancel", end),
        make("button", { type: "submit", className: "primary" }, "Send"),
      ),
    );
    field.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation();
        end();
      }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(event);
    });
    this.text.replaceWith(form);
    this.foot.hidden = true;
    field.style.height = `${Math.min(400, Math.max(80, field.scrollHeight + 4))}px`;
    field.focus();
  }
}

export class ResultsView extends TurnView {
  constructor(turn, acts) {
    super(turn, acts, "results", "Tool results");
    const results = turn.results.map((one) =>
      make(
        "details",
        { className: "thinking" },
        make("summary", {}, `Result of ${one.name ?? "the tool"}`),
        make("pre", { tabindex: "0" }, pretty(one.content)),
      ),
    );
    this.element.append(...results, this.foot);
  }

  refresh() {
    this.foot.replaceChildren(...[branches(this.turn, this.acts)].filter(Boolean));
  }
}

export class AnswerView extends TurnView {
  constructor(turn, acts) {
    super(turn, acts, "assistant", "Assistant");
    this.state = make("div", { className: "state", hidden: true });
    this.summary = make("summary");
    this.thought = make("div", {
      className: "thought text",
      tabindex: "0",
      role: "region",
      "aria-label": "Thought",
    });
    this.details = make("details", { className: "thinking", hidden: true }, this.summary, this.thought);
    this.content = make("div", { className: "content" });
    this.calls = make("div", { className: "calls" });
    this.cards = [];
    this.error = make("div", { className: "error", role: "alert", hidden: true });
    this.element.append(this.state, this.details, this.content, this.calls, this.error, this.foot);
    this.load();
  }

  // Everything that is there already.
  load() {
    const { turn } = this;
    if (turn.reasoning) {
      this.details.hidden = false;
      this.thought.textContent = turn.reasoning;
    }
    this.showContent();
    for (const call of turn.calls ?? []) this.addCard(call);
  }

  showContent() {
    const { turn } = this;
    this.content.replaceChildren();
    const shown = looksStructured(turn.content)
      ? `\`\`\`\`json\n${pretty(turn.content)}\n\`\`\`\``
      : turn.content;
    if (shown) rendered(this.content, shown);
  }

  addCard(call) {
    const card = new ToolCard(call);
    this.cards.push(card);
    this.calls.append(card.element);
    return card;
  }

  // A run begins to fill this turn.
  follow(run) {
    this.run = run;
    run.changed = (what, value) => this.change(what, value);
    this.element.setAttribute("aria-busy", "true");
    this.error.hidden = true;
    this.showsTokens = false;
    this.content.replaceChildren();
    this.rendering = new Rendering(this.content, () => this.acts.grown());
    if (this.turn.content) this.rendering.push(this.turn.content);
    this.speaker = new Speaker();
    this.state.hidden = false;
    this.timer = setInterval(() => this.tick(), TICK_MS);
    this.tick();
    this.refresh();
  }

  change(what, value) {
    if (what === "reasoning") {
      this.details.hidden = false;
      // One text node: a long thought has very many pieces.
      if (this.thought.firstChild) this.thought.firstChild.appendData(value);
      else this.thought.append(value);
    } else if (what === "content") {
      this.rendering.push(value);
      this.speaker.push(value);
    } else if (what === "call") {
      const card = this.cards[value] ?? this.addCard(this.turn.calls[value]);
      card.update(false);
    } else this.tick();
    if (what !== "content") this.acts.grown();
  }

  // What changes with time: the state line, seconds of the thought, the speed.
  tick() {
    const { run } = this;
    if (!run) return;
    const isSilent = run.phase === "sent" || run.phase === "reading";
    this.state.hidden = !isSilent;
    if (isSilent) this.showState(run);
    if (this.turn.reasoning) this.showSummary();
    const tokens = run.num.reasoning + run.num.content;
    if (tokens && this.live) {
      const speed = run.speed ? ` · ${run.speed.toFixed(1)} tokens/s` : "";
      this.live.textContent = `${plural(tokens, "token")}${speed}`;
    }
  }

  showState(run) {
    const { progress } = run;
    let words =
      run.phase === "reading"
        ? "Reading your question"
        : run.seconds < 1.5
          ? "Sent"
          : "Waiting for the server";
    let share = null;
    if (run.ahead === 0) words = "Waiting for a free place: next in the queue";
    else if (run.ahead) words = `Waiting for a free place: ${plural(run.ahead, "request")} ahead`;
    else if (progress && progress.total > 0) {
      // Tokens from the cache take no time.
      const fresh = progress.total - (progress.cache ?? 0);
      const done = Math.max(0, progress.processed - (progress.cache ?? 0));
      share = progress.processed / progress.total;
      const left = done > 0 ? ((progress.time_ms / 1000) * (fresh - done)) / done : null;
      const eta = left !== null && left >= 1 ? `, about ${duration(left)} left` : "";
      words = `Reading ${plural(progress.total, "token")}: ${Math.floor(100 * share)} %${eta}`;
    }
    const time = run.seconds >= 2 ? ` · ${duration(run.seconds)}` : "";
    if (!this.stateText) {
      this.stateText = make("span");
      this.bar = make("progress", { max: "1", "aria-label": "Reading the prompt" });
      this.state.replaceChildren(
        make("span", { className: "pulse", "aria-hidden": "true" }),
        this.stateText,
        this.bar,
      );
    }
    this.stateText.textContent = words + time;
    this.bar.hidden = share === null;
    if (share !== null) this.bar.value = share;
  }

  showSummary() {
    const { turn, run } = this;
    const tokens =
      turn.usage?.completion_tokens_details?.reasoning_tokens || run?.num.reasoning || turn.thinkingTokens;
    const seconds = run ? run.thinkingSeconds : turn.thinkingSeconds;
    const facts = [seconds !== undefined ? duration(seconds) : null, tokens ? plural(tokens, "token") : null];
    const isRunning = run?.phase === "thinking";
    const words = [isRunning ? "Thinking…" : "Thought", ...facts.filter(Boolean)].join(" · ");
    this.details.classList.toggle("running", isRunning);
    this.summary.replaceChildren(icon("right"), words);
  }

  // The run is over.
  end() {
    clearInterval(this.timer);
    this.rendering.finish();
    if (looksStructured(this.turn.content)) this.showContent();
    this.speaker.finish(this.turn);
    for (const card of this.cards) card.update(true);
    this.run = this.rendering = null;
    this.state.hidden = true;
    this.element.removeAttribute("aria-busy");
    this.refresh();
    this.acts.grown();
  }

  refresh() {
    const { turn, acts, run } = this;
    if (turn.reasoning) this.showSummary();
    const isLast = acts.isLast(turn);
    for (const card of this.cards) card.offer(isLast && !run);
    if (run) {
      this.live = make("span", { className: "facts" });
      this.foot.replaceChildren(this.live);
      return;
    }
    this.error.hidden = !turn.error;
    if (turn.error) this.error.replaceChildren(make("span", {}, turn.error), ...acts.remedies(turn));
    const isElsewhere = this.isElsewhere();
    const isCut = turn.finish === "length" || (!turn.finish && !isElsewhere);
    const canContinue = isCut && isLast && !turn.calls?.length && (turn.content || turn.reasoning);
    const busy = acts.isBusy();
    const buttons = [
      branches(turn, acts),
      turn.content ? copyButton("Copy answer", () => turn.content) : null,
      iconButton("retry", "Retry", () => acts.retry(turn)),
      deleteButton(turn, acts),
      canContinue ? textButton("Continue", () => acts.continue(turn)) : null,
      turn.logprobs?.length ? this.tokensButton() : null,
      turn.calls?.length && isLast
        ? textButton("Send results", () => acts.sendResults(turn, this.cards), "primary")
        : null,
      make("span", { className: "facts" }, this.facts()),
    ].filter(Boolean);
    for (const button of buttons) if (button.matches("button:not(.copy)") && busy) button.disabled = true;
    this.foot.replaceChildren(...buttons);
  }

  // Whether another tab receives this answer. Checked again later, in case that tab is gone.
  isElsewhere() {
    const isActive = !this.turn.finish && Date.now() - (this.turn.active ?? 0) < ACTIVE_MS;
    if (isActive) this.later ??= setTimeout(() => ((this.later = null), this.refresh()), ACTIVE_MS);
    return isActive;
  }

  facts() {
    const { turn } = this;
    const found = [];
    if (turn.usage) {
      const { completion_tokens: tokens, prompt_tokens: prompt, prompt_tokens_details: of } = turn.usage;
      found.push(plural(tokens, "token"));
      if (turn.speed) found.push(`${turn.speed.toFixed(1)} tokens/s`);
      const cached = of?.cached_tokens ? `, ${count(of.cached_tokens)} cached` : "";
      found.push(`prompt ${count(prompt)}${cached}`);
    }
    if (turn.finish === "length") found.push("cut at the token limit");
    else if (turn.stopped) found.push("stopped");
    else if (!turn.finish && !turn.error)
      found.push(this.isElsewhere() ? "being answered in another tab" : "interrupted");
    return found.join(" · ");
  }

  tokensButton() {
    const button = textButton("Tokens", () => {
      this.showsTokens = !this.showsTokens;
      button.setAttribute("aria-pressed", String(this.showsTokens));
      if (this.showsTokens) this.content.replaceChildren(tokensView(this.turn.logprobs));
      else this.showContent();
    });
    button.setAttribute("aria-pressed", String(Boolean(this.showsTokens)));
    return button;
  }
}
