/** The API key. It stays in this tab and is gone when the tab closes. */

import { forget, read, write } from "./stored.js";

const HERE = { lasting: false };

export const key = () => read("key", "", HERE);
export const setKey = (secret) => write("key", secret, HERE);

/** Returns a word that tells keys apart, for what the browser keeps of each; it does not tell the key. */
export function keyTag() {
  const mixed = [...key()].reduce((hash, letter) => Math.imul(hash ^ letter.charCodeAt(0), 16_777_619), 2_166_136_261);
  return key() && (mixed >>> 0).toString(36);
}

export const dropKey = () => forget("key", HERE);
