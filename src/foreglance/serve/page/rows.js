/** The picture of rows and positions for the conversation, drawn by the server, with its numbers as a table for screen readers.
 *
 * The picture comes into the page as an image, so nothing in it can act.
 */
import { postJson } from "./api.js";

export class RowsPanel {
  /** `body()` is the request to explain, or null while there is nothing to draw. */
  constructor(panel, body) {
    this.panel = panel;
    this.body = body;
    this.note = document.getElementById("rows-note");
    this.picture = document.getElementById("rows-picture");
    this.image = document.getElementById("rows-image");
    this.table = document.getElementById("rows-table");
    panel.addEventListener("toggle", () => this.refresh());
  }

  async refresh() {
    if (!this.panel.open) return;
    this.asked?.abort();
    const asked = (this.asked = new AbortController());
    const body = this.body();
    if (!body) return this.empty("Nothing yet: write or attach something first.");
    try {
      const explained = await postJson("explain", body, asked.signal);
      this.draw(explained);
    } catch (error) {
      if (error.name !== "AbortError") this.empty(error.message);
    }
  }

  empty(sentence) {
    this.note.textContent = sentence;
    this.picture.hidden = this.table.hidden = true;
  }

  draw({ svg, tracks, rows, images }) {
    this.note.textContent = "";
    URL.revokeObjectURL(this.image.src);
    this.image.src = URL.createObjectURL(new Blob([svg], { type: "image/svg+xml" }));
    this.image.alt = `${rows} rows, ${images.length} ${images.length === 1 ? "image" : "images"}; the table that follows has the numbers.`;
    this.table.tBodies[0].replaceChildren(...tracks.map(line));
    this.picture.hidden = this.table.hidden = false;
  }
}

function line({ name, rows, positions }) {
  const row = document.createElement("tr");
  const head = document.createElement("th");
  head.scope = "row";
  head.textContent = name === "target" ? "the model" : `draft, ${name}`;
  row.append(head);
  row.insertCell().textContent = rows;
  row.insertCell().textContent = positions.at(-1).join(", ");
  return row;
}
