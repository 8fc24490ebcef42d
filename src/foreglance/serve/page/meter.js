/** The three figures and the bars by depth, live while an answer comes and exact when it has ended. */

export class Meter {
  constructor() {
    const get = (id) => document.getElementById(id);
    this.speed = get("figure-speed");
    this.step = get("figure-step");
    this.accepted = get("figure-accepted");
    this.table = get("depths");
    this.body = this.table.querySelector("tbody");
    this.note = get("meter-note");
  }

  clear() {
    for (const figure of [this.speed, this.step, this.accepted]) figure.textContent = "–";
    this.table.hidden = true;
    this.body.replaceChildren();
    this.say(null);
  }

  say(sentence) {
    this.note.textContent = sentence ?? "";
    this.note.hidden = !sentence;
  }

  /** Figures of an answer so far. */
  show({ tokensPerSecond, steps, timings }) {
    this.speed.textContent = decimal(tokensPerSecond, 1);
    this.step.textContent = decimal(steps.tokensPerStep, 2);
    this.accepted.textContent = percent(sum(steps.stood), sum(steps.tried));
    this.table.hidden = !steps.tried.length;
    steps.tried.forEach((tried, i) => this.bar(i, tried, steps.stood[i]));
    this.say(timings?.off_because ? `Drafts were off: ${timings.off_because}.` : null);
  }

  bar(index, tried, stood) {
    const row = this.body.rows[index] ?? this.newRow(index);
    row.querySelector(".fill").style.width = `${(100 * stood) / tried}%`;
    row.querySelector(".share").textContent = percent(stood, tried);
    row.querySelector(".counts").textContent = `${stood} of ${tried}`;
  }

  newRow(index) {
    const row = this.body.insertRow();
    const head = document.createElement("th");
    head.scope = "row";
    head.textContent = index + 1;
    row.append(head);
    const cell = row.insertCell();
    const [track, fill, share] = ["track", "fill", "share"].map(span);
    track.append(fill);
    cell.className = "bar-cell";
    cell.append(track, share);
    row.insertCell().className = "counts";
    return row;
  }
}

function span(name) {
  const element = document.createElement("span");
  element.className = name;
  return element;
}

export const sum = (list) => list.reduce((total, one) => total + one, 0);
export const decimal = (value, digits) => (value == null || !Number.isFinite(value) ? "–" : value.toFixed(digits));
export const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
