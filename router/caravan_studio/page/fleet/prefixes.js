/** What shards keep of ended sequences for prompts with the same beginning. */

import { deleteJson, getJson, send } from "../base/api.js";
import { button, element } from "../base/dom.js";
import { bytes, count, seconds } from "../base/format.js";
import { attempt } from "../base/notices.js";
import { shardName } from "../base/shards.js";
import { asking, card } from "./tables.js";

const COLUMNS = [
  ["Prefix"],
  ["Key"],
  ["Tokens", "number"],
  ["Cells", "number"],
  ["Saved", "number"],
  ["Unused for", "number"],
  ["Actions", "actions"],
];
const MOST_ROWS = 50;

export function prefixTables({ shards }, done) {
  const byName = (one, other) => one.shard.localeCompare(other.shard, "en", { numeric: true });
  return shards.toSorted(byName).map((shard) => {
    const shown = shard.prefixes.slice(-MOST_ROWS).reverse();
    const flush = asking({
      label: "Flush",
      of: shardName(shard.shard),
      details: "All cached prefixes that no running request uses are evicted.",
      action: () => deleteJson(`admin/prefixes?shard=${encodeURIComponent(shard.shard)}`),
      done,
    });
    const title = `Cached on ${shardName(shard.shard)}`;
    const held = `${count(shard.cells)} cells, ${bytes(shard.memory_bytes)} in memory, ${bytes(shard.disk_bytes)} on disk`;
    const options = { actions: [element("span", { class: "quiet" }, held), ...(shard.prefixes.length ? [flush] : [])] };
    return card(
      title,
      COLUMNS,
      shown.map((prefix) => row(prefix, done)),
      options,
    );
  });
}

function row(prefix, done) {
  return [
    element("code", {}, prefix.id.slice(0, 12)),
    [prefix.tenant, prefix.adapter].filter(Boolean).join(", "),
    count(prefix.tokens),
    count(prefix.cells),
    bytes(prefix.memory_bytes + prefix.disk_bytes),
    seconds(prefix.idle_s),
    element("div", { class: "row end" }, look(prefix), pin(prefix, done), evict(prefix, done)),
  ];
}

/** Shows the text of a prefix. It is a user's, so it is read only when an operator asks for it. */
function look({ id }) {
  const show = () =>
    attempt(async () => {
      const { text } = await getJson(`admin/prefixes/${id}`);
      const close = button("Close", () => dialog.close());
      const content = element(
        "pre",
        { class: "as-is", tabIndex: 0 },
        (text ?? "Its tokens are not known.").slice(0, 20_000),
      );
      const dialog = element(
        "dialog",
        { "aria-label": "Text of a prefix" },
        content,
        element("div", { class: "row end" }, close),
      );
      dialog.addEventListener("close", () => dialog.remove());
      document.body.append(dialog);
      dialog.showModal();
    });
  return button("Text", show, { class: "small", "aria-label": `Text of ${id.slice(0, 12)}` });
}

function pin({ id, pinned }, done) {
  return asking({
    label: pinned ? "Unpin" : "Pin",
    of: id.slice(0, 12),
    details: pinned ? "It makes way for others again." : "What is saved of it does not make way for others.",
    action: () => send(pinned ? "DELETE" : "POST", `admin/prefixes/${id}/pin`),
    done,
  });
}

function evict({ id }, done) {
  return asking({
    label: "Evict",
    of: id.slice(0, 12),
    details: "From all shards, except what others share.",
    action: () => deleteJson(`admin/prefixes/${id}`),
    done,
  });
}
