// The open conversation: its turns on the page, and what the buttons of turns do.

import { $, announce, count, make, plural, textButton, toast } from "./dom.js";
import { Conversation, messagesOf } from "./conversation.js";
import { welcome } from "./welcome.js";
import { model } from "./model.js";
import { Run } from "./run.js";
import { Follower } from "./scroll.js";
import * as settings from "./settings.js";
import { AnswerView, QuestionView, ResultsView } from "./turn-view.js";

// What another tab may change of a turn.
const SHOWN = ["content", "reasoning", "finish", "error", "stopped", "active"];
const VIEWS = { user: QuestionView, assistant: AnswerView, tool: ResultsView };

export class Chat {
  // `changed()`: the list may have to be drawn again.
  constructor(changed) {
    this.changed = changed;
    this.runs = new Map(); // conversation's id -> Run; those of other conversations go on
    this.views = new Map();
    this.follower = new Follower($("talk"), $("down"));
    this.conversation = new Conversation();
    this.asks = (text, sampling) => this.send(text, [], sampling);
  }

  get run() {
    return this.runs.get(this.conversation.id) ?? null;
  }

  // Show a conversation at its end. While it is answered in this tab, memory is newer than the storage.
  async open(fields) {
    const run = this.runs.get(fields.id);
    this.show(run ? run.conversation : await Conversation.load(fields));
  }

  show(conversation) {
    this.conversation = conversation;
    this.views.clear();
    $("turns").replaceChildren();
    this.draw();
    if (this.path.length) this.follower.toEnd();
    else this.follower.toStart();
  }

  fresh() {
    this.show(new Conversation());
  }

  // Another tab has changed this conversation.
  async reload() {
    if (this.run || !this.conversation.isKept) return;
    const { id } = this.conversation;
    const fresh = await Conversation.load(this.conversation);
    if (this.run || this.conversation.id !== id) return;
    this.conversation = fresh;
    for (const [id, view] of this.views) {
      const turn = fresh.turns.get(id);
      const isSame = turn && SHOWN.every((name) => String(turn[name]) === String(view.turn[name]));
      if (isSame) view.turn = turn;
      else this.views.delete(id);
    }
    this.draw();
    this.follower.grown();
  }

  // Put the views of the shown path in place; views that are there already are not touched.
  draw() {
    const { conversation } = this;
    const path = (this.path = conversation.path());
    const box = $("turns");
    const wanted = path.map((turn) => this.view(turn));
    if (!wanted.length) wanted.push(this.empty());
    wanted.forEach((view, at) => {
      if (box.children[at] !== view.element) box.insertBefore(view.element, box.children[at] ?? null);
    });
    while (box.children.length > wanted.length) box.lastChild.remove();
    for (const view of wanted) view.refresh?.();
    document.body.classList.toggle("is-empty", !path.length);
    this.showBusy();
    this.showContext();
    document.title = path.length ? `${conversation.title} – ${model.name || "dsv4"}` : model.name || "dsv4";
    history.replaceState(null, "", path.length ? `#${conversation.id}` : location.pathname);
  }

  empty() {
    return { element: welcome(this.asks) };
  }

  view(turn) {
    let view = this.views.get(turn.id);
    if (!view) {
      view = new VIEWS[turn.role](turn, this);
      this.views.set(turn.id, view);
      const run = this.run;
      if (run?.turn === turn) view.follow(run);
    }
    return view;
  }

  showBusy() {
    const busy = Boolean(this.run);
    const hadFocus = document.activeElement === $("stop") || document.activeElement === $("send");
    $("send").hidden = busy;
    $("stop").hidden = !busy;
    if (hadFocus) $(busy ? "stop" : "question").focus({ preventScroll: true });
  }

  // How full the context is after the last answer.
  showContext() {
    const used = this.path?.findLast((turn) => turn.usage)?.usage.total_tokens;
    const box = $("context");
    box.hidden = !used || !model.context;
    if (box.hidden) return;
    const share = used / model.context;
    box.title = `${count(used)} of ${count(model.context)} tokens of context used`;
    box.querySelector("meter").value = share;
    box.querySelector("span").textContent = `${count(used)} / ${count(model.context)}`;
    box.querySelector("meter").setAttribute("aria-label", box.title);
  }

  // Called by the views of turns.

  isBusy() {
    return Boolean(this.run);
  }

  isLast(turn) {
    return this.path.at(-1) === turn;
  }

  place(turn) {
    const all = this.conversation.siblings(turn.parent);
    return [all.indexOf(turn), all];
  }

  grown() {
    this.follower.grown();
  }

  pick(turn, step) {
    if (this.run) return void toast("Versions can be switched when the answer is complete.");
    this.conversation.pick(turn);
    this.draw();
    const label = step < 0 ? "Previous version" : "Next version";
    const buttons = this.views.get(turn.id).element.querySelectorAll(".branches button:not([disabled])");
    ([...buttons].find((one) => one.getAttribute("aria-label") === label) ?? buttons[0])?.focus();
  }

  // -> false where nothing was sent, so that the field keeps its text.
  send(content, files, sampling = {}) {
    if (this.run) {
      toast("One answer at a time: wait for it, or stop it with Esc.");
      return false;
    }
    const fields = this.fields();
    if (!fields) return false;
    Object.assign(fields, sampling);
    const question = {
      role: "user",
      content,
      ...(files.length ? { files: files.map((file) => ({ ...file })) } : {}),
    };
    this.answer(this.conversation.add(this.path.at(-1) ?? null, question), fields);
    return true;
  }

  edit(turn, content) {
    const fields = this.fields();
    if (!fields || this.run) return;
    const { files } = turn;
    const question = { role: "user", content: content.trim(), ...(files ? { files } : {}) };
    this.answer(this.conversation.add(this.conversation.turns.get(turn.parent), question), fields);
  }

  retry(turn) {
    const fields = this.fields();
    if (!fields || this.run) return;
    // Reuse an answer without any text instead of keeping it as a version.
    const isEmpty = this.isLast(turn) && !turn.content && !turn.reasoning && !turn.calls?.length;
    this.answer(this.conversation.turns.get(turn.parent), fields, isEmpty ? turn : null);
    this.views.get(this.run.turn.id).element.focus({ preventScroll: true });
  }

  remove(turn) {
    if (this.run) return;
    const { conversation } = this;
    const gone = conversation.remove(turn);
    this.draw();
    $("question").focus({ preventScroll: true });
    const undo = async () => {
      await conversation.restore(gone);
      if (this.conversation === conversation) this.draw();
    };
    toast(`Deleted ${plural(gone.length, "message")}.`, { action: undo, label: "Undo", seconds: 10 });
  }

  continue(turn) {
    const fields = this.fields();
    if (!fields || this.run) return;
    const begun = { role: "assistant", content: turn.content, prefix: true };
    if (turn.reasoning) begun.reasoning_content = turn.reasoning;
    delete fields.response_format; // the server refuses a format for a continued answer
    const messages = [...messagesOf(this.conversation.before(turn)), begun];
    this.begin(new Run(this.conversation, turn, this.body(messages, fields)));
  }

  sendResults(turn, cards) {
    const fields = this.fields();
    if (!fields || this.run) return;
    const results = cards.map(({ call, input }) => ({
      id: call.id,
      name: call.function.name,
      content: input.value,
    }));
    this.answer(this.conversation.add(turn, { role: "tool", results }), fields);
  }

  remedies(turn) {
    if (turn.status === 401) return [textButton("Enter the key", () => settings.openSettings("key"))];
    return this.isLast(turn) ? [textButton("Try again", () => this.retry(turn))] : [];
  }

  // The settings' part of a request, or null after telling what is wrong with them.
  fields() {
    try {
      return settings.fields();
    } catch (problem) {
      if (!(problem instanceof settings.Wrong)) throw problem;
      settings.openSettings(problem.field);
      toast(problem.message, { bad: true, seconds: 15 });
      return null;
    }
  }

  body(messages, fields) {
    const system = settings.system();
    const body = {
      messages: system ? [{ role: "system", content: system }, ...messages] : messages,
      stream: true,
      stream_options: { include_usage: true },
      ...fields,
    };
    if (model.hasProgress) body.return_progress = true;
    return body;
  }

  // Answer the turn `question`, in `turn` where it is given.
  answer(question, fields, turn = null) {
    const { conversation } = this;
    const messages = messagesOf([...conversation.before(question), question]);
    turn ??= conversation.add(question, { role: "assistant", content: "" });
    this.begin(new Run(conversation, turn, this.body(messages, fields)));
  }

  begin(run) {
    const { conversation, turn } = run;
    const known = this.views.get(turn.id);
    this.runs.set(conversation.id, run);
    known?.follow(run);
    this.draw();
    this.follower.toEnd();
    this.changed();
    run.work().then(() => this.over(run));
  }

  over(run) {
    const { conversation, turn } = run;
    this.runs.delete(conversation.id);
    if (this.conversation === conversation) {
      this.views.get(turn.id)?.end();
      this.draw();
      if (settings.echoesTools() && turn.calls?.length && turn.finish === "tool_calls") this.echo(turn);
    } else announce(`An answer in “${conversation.title}” is complete.`);
    this.changed();
  }

  // Answer each call with its own arguments, a few times in a row at most.
  echo(turn) {
    const rounds = this.path.slice(-8).filter((one) => one.role === "tool").length;
    if (rounds >= 4) return void toast("Echoed four times in a row; send further results by hand.");
    const { cards } = this.views.get(turn.id);
    for (const card of cards) card.input.value = card.call.function.arguments;
    this.sendResults(turn, cards);
  }

  // The tab is about to close or to sleep.
  keep() {
    for (const run of this.runs.values()) {
      run.isLeaving = true;
      run.save();
    }
  }

  stop() {
    this.run?.stop();
  }
}
