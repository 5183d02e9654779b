/** A canvas as wide as its place, sharp on every screen. */

import { element } from "../base/dom.js";

/** Returns `{node, begin(height)}`; `begin` clears the canvas and returns its context and width. */
export function canvas(properties = {}) {
  const node = element("canvas", properties);
  const context = node.getContext("2d", { alpha: false });
  return {
    node,
    begin(height, ground) {
      const scale = devicePixelRatio || 1;
      const width = node.clientWidth;
      const [pixels, lines] = [Math.max(1, Math.round(width * scale)), Math.max(1, Math.round(height * scale))];
      if (node.width !== pixels || node.height !== lines) {
        node.width = pixels;
        node.height = lines;
        node.style.height = `${height}px`;
      }
      context.setTransform(scale, 0, 0, scale, 0, 0);
      context.fillStyle = ground;
      context.fillRect(0, 0, width, height);
      return { context, width };
    },
  };
}
