/** The settings form: filled from what the server offers, kept in this browser, turned into fields of a request. */

const STORE = "foreglance.settings";
const MEANING = {
  see: "The draft gets the image’s embeddings, like the model itself.",
  skip: "The draft gets no rows for an image.",
  placeholder: "The draft gets a placeholder token for each image row.",
};

export class Settings {
  constructor(form) {
    this.form = form;
    this.fields = form.elements;
    form.addEventListener("input", () => this.changed());
    form.addEventListener("reset", () => setTimeout(() => this.changed()));
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  /** Fill the choices from the answer of /props, and choose what was chosen before. */
  offer({ speculation }) {
    this.fill(speculation);
    this.restore();
    this.changed();
  }

  fill({ draft_kinds, image_policies, max_depth }) {
    const depths = Array.from({ length: max_depth }, (_, i) => String(i + 1));
    options(this.fields.draft, draft_kinds);
    options(this.fields.depth, ["auto", ...depths]);
    options(this.fields.images, image_policies);
    this.fields.draft.closest("label").hidden = draft_kinds.length < 2;
  }

  /** Fields of a chat completion. Drafts off is depth 0. */
  get body() {
    const { drafts, draft, depth, images, temperature, max_tokens, seed } = this.fields;
    return {
      speculative: drafts.checked
        ? { draft: draft.value, depth: depth.value === "auto" ? "auto" : Number(depth.value), images: images.value }
        : { depth: 0 },
      temperature: number(temperature),
      max_tokens: number(max_tokens),
      seed: number(seed),
    };
  }

  get system() {
    return this.fields.system.value;
  }

  /** The first field that holds what its limits forbid, in words; null if none. */
  get wrong() {
    const field = [...this.fields].find((one) => one.name && !one.checkValidity());
    return field ? `${label(field)}: ${field.validationMessage}` : null;
  }

  changed() {
    for (const name of ["draft", "depth", "images"]) this.fields[name].disabled = !this.fields.drafts.checked;
    document.getElementById("images-hint").textContent = MEANING[this.fields.images.value] ?? "";
    localStorage.setItem(STORE, JSON.stringify(values(this.fields)));
  }

  restore() {
    const kept = JSON.parse(localStorage.getItem(STORE) ?? "{}");
    for (const [name, value] of Object.entries(kept)) {
      const field = this.fields[name];
      if (field?.type === "checkbox") field.checked = value;
      else if (field?.tagName !== "SELECT" || [...field.options].some((option) => option.value === value)) field.value = value;
    }
  }
}

function options(select, names) {
  select.replaceChildren(...names.map((name) => new Option(name, name)));
}

const label = (field) => field.closest("label").firstChild.textContent.trim();

/** An empty number field is left to the server's default. */
const number = (field) => (field.value === "" ? undefined : field.valueAsNumber);

const values = (fields) =>
  Object.fromEntries([...fields].filter((one) => one.name).map((one) => [one.name, one.type === "checkbox" ? one.checked : one.value]));
