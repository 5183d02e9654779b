/** Makes elements. Text is always set as text, never read as HTML. */

/**
 * Returns an element. Properties that begin with "on" are listeners; those that the element has are set, the others
 * become attributes. Children that are null are left out.
 */
export function element(tag, properties = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "class") made.className = value;
    else if (name in made && !name.startsWith("aria-")) made[name] = value;
    else made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

export function button(label, onclick, properties = {}) {
  return element("button", { type: "button", onclick, ...properties }, label);
}

/** Returns a label with its control, which gets an id for it. */
export function labelled(text, control, hint = null) {
  control.id ||= `control-${(labelled.made = (labelled.made ?? 0) + 1)}`;
  return element("div", { class: "field" }, element("label", { htmlFor: control.id }, text), control, hint);
}

/** Puts an element into another one, which takes its place. */
export function wrap(inner, outer) {
  inner.replaceWith(outer);
  outer.append(inner);
}

export const byId = (id) => document.getElementById(id);
