/** Values that the browser keeps for this server: JSON under a name. A browser may forbid it; then they last as long as the page. */

const PREFIX = "caravan.";
const unkept = new Map();

function area(lasting) {
  try {
    return lasting ? localStorage : sessionStorage;
  } catch {
    return null;
  }
}

export function read(name, fallback = null, { lasting = true } = {}) {
  try {
    const text = area(lasting)?.getItem(PREFIX + name) ?? unkept.get(name);
    return text === undefined || text === null ? fallback : JSON.parse(text);
  } catch {
    return fallback;
  }
}

export function write(name, value, { lasting = true } = {}) {
  const text = JSON.stringify(value);
  unkept.set(name, text);
  try {
    area(lasting)?.setItem(PREFIX + name, text);
  } catch {
    // It is full: the value lasts as long as the page.
  }
}

export function forget(name, { lasting = true } = {}) {
  unkept.delete(name);
  area(lasting)?.removeItem(PREFIX + name);
}
