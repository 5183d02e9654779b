/** Pictures for a message, where the model sees. They are made small before they are sent. */

import { button, element } from "../base/dom.js";
import { attempt } from "../base/notices.js";
import { chosenModel, listedModels, onModels } from "../base/models.js";

const LONGEST_SIDE = 1536;
const QUALITY = 0.88;
const MOST = 8;

export class Pictures {
  #urls = [];

  constructor(field) {
    this.file = element("input", {
      type: "file",
      accept: "image/*",
      multiple: true,
      hidden: true,
      "aria-label": "Images",
    });
    this.file.addEventListener("change", () => {
      this.#add([...this.file.files]);
      this.file.value = "";
    });
    this.opener = button("Add an image", () => this.file.click(), { class: "plain small", hidden: true });
    this.shown = element("div", { class: "row pictures" });
    field.addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files].filter((file) => file.type.startsWith("image/"));
      if (!files.length || this.opener.hidden) return;
      event.preventDefault();
      this.#add(files);
    });
    onModels(() => (this.opener.hidden = !sees()));
  }

  /** Returns the parts of a message for the pictures that were added, and forgets them. */
  take() {
    const parts = this.#urls.map((url) => ({ type: "input_image", image_url: url }));
    this.#urls = [];
    this.#show();
    return parts;
  }

  #add(files) {
    return attempt(async () => {
      const made = await Promise.all(files.map(smaller));
      this.#urls = [...this.#urls, ...made].slice(0, MOST);
      this.#show();
    });
  }

  #show() {
    this.shown.replaceChildren(
      ...this.#urls.map((url, at) => {
        const remove = () => {
          this.#urls.splice(at, 1);
          this.#show();
        };
        const label = `Remove image ${at + 1}`;
        return element(
          "span",
          { class: "picture" },
          element("img", { src: url, alt: `Image ${at + 1}` }),
          button("✕", remove, { class: "small", "aria-label": label }),
        );
      }),
    );
  }
}

/** Returns whether the chosen model takes pictures. */
function sees() {
  const models = listedModels();
  const model = models.find(({ id }) => id === chosenModel()) ?? models[0];
  return Boolean(model?.architecture?.input_modalities?.includes("image"));
}

/** Returns a picture as the URL of a JPEG that is no larger than a model needs. */
async function smaller(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name} is not an image that this browser can read.`);
  }
  const scale = Math.min(1, LONGEST_SIDE / Math.max(bitmap.width, bitmap.height));
  const canvas = element("canvas", {
    width: Math.round(bitmap.width * scale),
    height: Math.round(bitmap.height * scale),
  });
  const context = canvas.getContext("2d");
  context.fillStyle = "white";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", QUALITY);
}
