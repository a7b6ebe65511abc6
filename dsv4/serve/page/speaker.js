// Reads an answer to screen readers sentence by sentence, so that single tokens do not interrupt.

import { announce } from "./dom.js";

const SENTENCE = /^[\s\S]*?[.!?…:](?=\s)/;
const MOST = 400;

export class Speaker {
  constructor() {
    this.rest = "";
    announce("The assistant answers.");
  }

  push(text) {
    this.rest = (this.rest + text).slice(-2 * MOST);
    for (
      let match = SENTENCE.exec(this.rest);
      match || this.rest.length > MOST;
      match = SENTENCE.exec(this.rest)
    ) {
      const said = match ? match[0] : this.rest.slice(0, MOST);
      this.rest = this.rest.slice(said.length);
      if (said.trim()) announce(said.trim());
    }
  }

  finish(turn) {
    if (this.rest.trim()) announce(this.rest.trim().slice(0, MOST));
    this.rest = "";
    announce(turn.error ? `Error: ${turn.error}` : turn.stopped ? "Stopped." : "The answer is complete.");
  }
}
