/** The calls that a conversation makes. */

import { deleteJson, getJson, postJson } from "../base/api.js";

const PAGE = 100;
const path = (id, rest = "") => `v1/conversations/${encodeURIComponent(id)}${rest}`;

export const create = async (title) => (await postJson("v1/conversations", { metadata: { title } })).id;
export const createFrom = async (exported) => (await postJson("v1/conversations", { import: exported })).id;
export const remove = (id) => deleteJson(path(id));
export const fork = async (id, at = null) => (await postJson(path(id, "/fork"), { at })).id;
export const rewind = (id, to) => postJson(path(id, "/rewind"), { to });
export const edit = (id, operations) => postJson(path(id, "/edit"), { operations });
export const add = async (id, items) => (await postJson(path(id, "/items"), { items })).data;
export const exportOf = (id) => getJson(path(id, "/export"));
export const cancel = (response) => postJson(`v1/responses/${response}/cancel`, undefined);

/** Returns all items, the oldest first. */
export async function itemsOf(id) {
  const items = [];
  for (let after = ""; ; after = `&after=${items.at(-1).id}`) {
    const page = await getJson(path(id, `/items?order=asc&limit=${PAGE}${after}`));
    items.push(...page.data);
    if (!page.has_more) return items;
  }
}

export const message = (role, text) => ({ type: "message", role, content: text });
