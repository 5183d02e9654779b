/** The names of shards, which are those in their logs. Recordings have addresses only. */

import { getJson } from "./api.js";

const names = new Map();

/** Learns the names of shards as the server lists them. An address tells those of one name apart. */
export function nameShards(shards) {
  const known = shards.filter((shard) => shard.shard_id);
  const of = (id) => known.filter((shard) => shard.shard_id === id).length;
  for (const { address, shard_id: id } of known) names.set(address, of(id) > 1 ? `${id} (${address})` : id);
}

export const readNames = async () => nameShards((await getJson("admin/shards")).shards);

/** Returns the name of the shard at an address. */
export const shardName = (address) =>
  names.get(address) ?? address.replace(/^unix:.*\/(.+?)(\.sock)?$/, "$1").replace(/^\d+$/, "shard-$&");
