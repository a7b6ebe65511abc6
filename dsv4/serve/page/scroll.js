// Scrolling: follow the end only while the reader is there; never move text that is being read.

const NEAR = 48;

export class Follower {
  constructor(scroller, button) {
    Object.assign(this, { scroller, button, follows: true, last: 0, height: 0 });
    scroller.addEventListener("scroll", () => this.moved(), { passive: true });
    button.addEventListener("click", () => {
      this.toEnd(matchMedia("(prefers-reduced-motion: reduce)").matches ? "auto" : "smooth");
      document.getElementById("question").focus({ preventScroll: true });
    });
    // The window, a phone's keyboard and a loaded formula change heights too.
    new ResizeObserver(() => this.grown()).observe(scroller);
    new ResizeObserver(() => this.grown()).observe(scroller.firstElementChild);
  }

  get distance() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight;
  }

  moved() {
    const { scrollTop, scrollHeight } = this.scroller;
    // Moved up although the text has not become shorter: the reader has left the end.
    if (scrollTop < this.last - 2 && scrollHeight >= this.height) this.follows = false;
    if (this.distance < NEAR) this.follows = this.distance < 4 || scrollTop >= this.last || this.follows;
    this.last = scrollTop;
    this.height = scrollHeight;
    this.button.hidden = this.distance < 200;
  }

  grown() {
    if (this.follows) this.jump();
    this.height = this.scroller.scrollHeight;
    this.button.hidden = this.follows || this.distance < 200;
  }

  jump() {
    this.scroller.scrollTop = this.scroller.scrollHeight;
    this.last = this.scroller.scrollTop;
  }

  toStart() {
    this.scroller.scrollTop = this.last = 0;
    this.follows = false;
  }

  toEnd(behavior = "auto") {
    this.follows = true;
    if (behavior === "auto") this.jump();
    else this.scroller.scrollTo({ top: this.scroller.scrollHeight, behavior });
    this.button.hidden = true;
  }
}
