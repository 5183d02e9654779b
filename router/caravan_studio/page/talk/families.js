/**
 * The conversations that this browser knows. The server keeps their items and does not list them: who knows an id may
 * read its conversation, if it is of the same API key. A family is a conversation with its forks.
 */

import { keyTag } from "../base/key.js";
import { read, write } from "../base/stored.js";

const MOST = 100;

const name = () => `families${keyTag()}`;

/**
 * Returns the families `{root, title, branches, shown, usage}`, the last used first. `root` names the family; `branches`
 * are ids of conversations, `shown` is that of the one that was shown last, and `usage` has what an answer cost by the
 * id of its last item.
 */
export const families = () => read(name(), []);

export function saveFamily(family) {
  const others = families().filter((one) => one.root !== family.root);
  write(name(), [family, ...others].slice(0, MOST));
}

export function dropFamily(family) {
  write(
    name(),
    families().filter((one) => one.root !== family.root),
  );
}
