// @ts-check
// Where the box of the tour goes: the corner of the window in which it covers least of its subject.

const EDGE = 16; // distance of the box from the edges of the window, in pixels

/** @typedef {{ left: number, top: number, width: number, height: number }} Box */

/** @param {Box} a @param {Box} b */
export function overlap(a, b) {
  const wide = Math.min(a.left + a.width, b.left + b.width) - Math.max(a.left, b.left);
  const high = Math.min(a.top + a.height, b.top + b.height) - Math.max(a.top, b.top);
  return Math.max(0, wide) * Math.max(0, high);
}

/** @param {Box} subject
 * @param {{ width: number, height: number }} box
 * @param {number} wide
 * @param {number} high  of the window */
export function freeCorner(subject, { width, height }, wide, high) {
  const corners = ["bottom-right", "bottom-left", "top-right", "top-left"].map((name) => {
    const left = name.endsWith("right") ? wide - width - EDGE : EDGE;
    const top = name.startsWith("bottom") ? high - height - EDGE : EDGE;
    return { name, covered: overlap(subject, { left, top, width, height }) };
  });
  return corners.reduce((best, corner) => (corner.covered < best.covered ? corner : best)).name;
}
