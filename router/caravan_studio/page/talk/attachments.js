/** The files of the next message: added by the button, pasted or dropped. */

import { byId, element } from "../base/dom.js";
import { bytes } from "../base/format.js";
import { icon, iconButton } from "../base/icons.js";
import { chosenModel, listedModels } from "../base/models.js";
import { announce, notice } from "../base/notices.js";
import { MOST_TEXT_BYTES, attachmentOf } from "./files.js";

const MOST = 8;
const HINT = `Attach up to ${MOST} files: text up to ${bytes(MOST_TEXT_BYTES)} each, PDF, images, audio`;

export class Attachments {
  #files = [];

  constructor(field) {
    this.input = element("input", { type: "file", multiple: true, hidden: true, "aria-label": "Files" });
    this.input.addEventListener("change", () => {
      this.#add([...this.input.files]);
      this.input.value = "";
    });
    this.opener = iconButton("attach", "Attach files", () => this.input.click(), { class: "attach", title: HINT });
    this.shown = element("ul", { class: "attachments", "aria-label": "Attached files", hidden: true });
    field.addEventListener("paste", (event) => {
      const files = [...event.clipboardData.files];
      // Office programs copy a picture beside the text.
      if (!files.length || event.clipboardData.types.includes("text/plain")) return;
      event.preventDefault();
      this.#add(files);
    });
    this.#acceptDrops(byId("talk"));
  }

  /** Returns the parts of a message for the files that were added, and forgets them. */
  take() {
    const parts = this.#files.map(({ part }) => part);
    this.#show([]);
    return parts;
  }

  get any() {
    return this.#files.length > 0;
  }

  #acceptDrops(place) {
    let depth = 0;
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    const mark = (by) => {
      depth = by === 0 ? 0 : depth + by;
      place.classList.toggle("drops", depth > 0);
    };
    place.addEventListener("dragenter", (event) => hasFiles(event) && mark(1));
    place.addEventListener("dragleave", (event) => hasFiles(event) && mark(-1));
    place.addEventListener("dragover", (event) => hasFiles(event) && event.preventDefault());
    place.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      mark(0);
      this.#add([...event.dataTransfer.files]);
    });
  }

  /** Adds files one by one: each that cannot be read is told by its name. */
  async #add(files) {
    for (const file of files) {
      if (this.#files.length >= MOST) {
        notice(`${file.name} was not added: a message takes ${MOST} files.`, "error");
        return;
      }
      try {
        const made = await attachmentOf(file, reads);
        this.#show([...this.#files, made]);
        announce(`${made.name} is attached.`);
      } catch (error) {
        notice(error.message, "error");
      }
    }
  }

  #show(files) {
    this.#files = files;
    this.shown.hidden = !files.length;
    this.shown.replaceChildren(...files.map((file) => this.#chip(file)));
  }

  #chip(file) {
    const remove = () => {
      this.#show(this.#files.filter((one) => one !== file));
      announce(`${file.name} is removed.`);
      this.opener.focus();
    };
    const picture = file.preview
      ? element("img", { src: file.preview, alt: "" })
      : icon(file.kind === "audio" ? "sound" : "file");
    return element(
      "li",
      { class: "attachment" },
      picture,
      element("span", { class: "attachment-name", title: file.name }, file.name),
      element("span", { class: "quiet" }, bytes(file.size)),
      iconButton("close", `Remove ${file.name}`, remove, { class: "small" }),
    );
  }
}

/** Returns whether the chosen model reads "image" or "audio". */
function reads(modality) {
  const models = listedModels();
  const model = models.find(({ id }) => id === chosenModel()) ?? models[0];
  return Boolean(model?.architecture?.input_modalities?.includes(modality));
}
