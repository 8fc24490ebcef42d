/** Pictures on their way into a message: read from files, shown as thumbnails, taken along by the next message. */

/** A file as `{name, url}` with a data URL, or a sentence that says why not. */
async function read(file, limits) {
  const name = file.name || "pasted picture";
  if (!file.type.startsWith("image/")) throw new Error(`${name} is not a picture.`);
  if (limits.bytes && file.size * 1.37 > limits.bytes) {
    throw new Error(`${name} is too large: ${size(file.size)}, and a message may have ${size(limits.bytes / 1.37)}.`);
  }
  const url = await new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(new Error(`${name} could not be read.`));
    reader.readAsDataURL(file);
  });
  return { name, url };
}

const size = (bytes) => `${(bytes / 1e6).toFixed(1)} MB`;

/** The pictures that wait below the message box. `complain(sentence)` shows what is wrong,
 * `tell(sentence)` is for ears alone. */
export class Attachments {
  constructor(list, template, complain, tell) {
    this.list = list;
    this.template = template;
    this.complain = complain;
    this.tell = tell;
    this.limits = {};
    this.pictures = [];
  }

  async add(files) {
    for (const file of files) {
      try {
        this.put(await read(file, this.limits));
      } catch (error) {
        this.complain(error.message);
      }
    }
  }

  put(picture) {
    this.pictures.push(picture);
    const item = this.template.content.firstElementChild.cloneNode(true);
    const image = item.querySelector("img");
    image.src = picture.url;
    image.alt = picture.name;
    image.addEventListener("error", () => {
      this.complain(`${picture.name} is not a picture that this browser can read.`);
      this.remove(picture, item);
    });
    const button = item.querySelector("button");
    button.setAttribute("aria-label", `Remove ${picture.name}`);
    button.addEventListener("click", () => this.removeByHand(picture, item));
    this.list.append(item);
    this.tell(`${picture.name} attached.`);
  }

  /** Focus goes to the next thumbnail's button, else to where the caller wants it. */
  removeByHand(picture, item) {
    const next = (item.nextElementSibling ?? item.previousElementSibling)?.querySelector("button");
    this.remove(picture, item);
    this.tell(`${picture.name} removed.`);
    if (next) next.focus();
    else this.list.dispatchEvent(new CustomEvent("emptied"));
  }

  remove(picture, item) {
    this.pictures = this.pictures.filter((other) => other !== picture);
    item.remove();
  }

  /** All pictures, leaving none. */
  take() {
    const taken = this.pictures;
    this.pictures = [];
    this.list.replaceChildren();
    return taken;
  }
}

/** The picture files of a drop or a paste. */
export const filesOf = (transfer) => [...(transfer?.files ?? [])];
