/** The shards that the router knows. */

import { send } from "../base/api.js";
import { element } from "../base/dom.js";
import { count, seconds } from "../base/format.js";
import { shardName } from "../base/shards.js";
import { asking, card, state } from "./tables.js";

const COLUMNS = [["Shard"], ["Model"], ["State"], ["Sequences", "number"], ["Cells"], ["Actions", "actions"]];

export function shardTable(shards, done) {
  const rows = shards.map((shard) => [
    [
      element("div", { title: shard.address }, shardName(shard.address)),
      element("div", { class: "quiet" }, [shard.version, shard.layout].filter(Boolean).join(", ")),
    ],
    shard.model ?? "",
    [state(shard.state), element("div", { class: "quiet" }, since(shard))],
    shard.limits ? `${count(shard.sequences)} of ${count(shard.limits.max_sequences)}` : "",
    shard.limits ? cells(shard) : "",
    shard.state === "serving" ? drain(shard, done) : "",
  ]);
  return card("Shards", COLUMNS, rows, { empty: "The router knows no shard." });
}

function since(shard) {
  const reason = shard.reason ? `: ${shard.reason}` : "";
  return `for ${seconds(shard.state_s)}${reason}`;
}

function cells({ used_cells: used, limits, address }) {
  const meter = element("meter", { min: 0, max: limits.cells, value: used, "aria-label": `Used cells of ${shardName(address)}` });
  return [meter, element("div", { class: "quiet" }, `${count(used)} of ${count(limits.cells)}`)];
}

function drain(shard, done) {
  return asking({
    label: "Drain",
    of: shardName(shard.address),
    details: "Its requests move to other shards or end, and then it ends.",
    action: () => send("POST", `admin/shards/${encodeURIComponent(shard.address)}/drain`),
    done,
  });
}
