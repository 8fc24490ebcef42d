/** Where a token came from: told on hovering or touching it, and with the arrow keys inside an answer. */

const MOVES = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity };

export class Tips {
  constructor(tip, tell) {
    this.tip = tip;
    this.tell = tell;
    this.current = null;
    document.addEventListener("pointerdown", ({ target }) => target.closest(".token") || this.hide());
    document.addEventListener("scroll", () => this.current && this.place(), { capture: true, passive: true });
  }

  /** Watch the tokens of an answer. */
  watch(answer) {
    const text = answer.textElement;
    text.addEventListener("pointerover", (event) => {
      const token = event.target.closest(".token");
      if (token) this.show(answer, token);
    });
    text.addEventListener("pointerleave", ({ pointerType }) => pointerType === "touch" || this.hide());
    text.addEventListener("focusout", () => this.hide());
    text.addEventListener("keydown", (event) => this.key(event, answer));
  }

  key(event, answer) {
    if (event.altKey || event.ctrlKey || event.metaKey || !(event.key in MOVES)) return;
    const tokens = [...answer.textElement.querySelectorAll(".token")];
    if (!tokens.length) return;
    event.preventDefault();
    const at = tokens.indexOf(this.current);
    const to = at < 0 && MOVES[event.key] > 0 ? 0 : Math.max(0, Math.min(tokens.length - 1, at + MOVES[event.key]));
    const token = tokens[event.key === "End" ? tokens.length - 1 : event.key === "Home" ? 0 : to];
    token.scrollIntoView({ block: "nearest" });
    this.show(answer, token);
    this.tell(`${token.textContent}: ${this.tip.textContent}`);
  }

  show(answer, token) {
    this.mark(token);
    this.tip.textContent = answer.describe(Number(token.dataset.index));
    this.tip.hidden = false;
    this.place();
  }

  place() {
    const box = this.current.getClientRects()[0];
    const { width, height } = this.tip.getBoundingClientRect();
    const left = Math.max(8, Math.min(box.left + box.width / 2 - width / 2, innerWidth - width - 8));
    const above = box.top - height - 8;
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${above >= 8 ? above : box.bottom + 8}px`;
  }

  /** Whether a tip was there to hide. */
  hide() {
    const shown = !this.tip.hidden;
    this.mark(null);
    this.tip.hidden = true;
    return shown;
  }

  mark(token) {
    this.current?.classList.remove("current");
    this.current = token;
    token?.classList.add("current");
  }
}
