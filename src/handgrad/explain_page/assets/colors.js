// @ts-check
// The colors of the pictures, in both themes. Three kinds: activations ("a"), error signals ("delta"), lengths ("size").
// An entry of Δ below 0 is blue: raising it lowers the loss. Above 0 it is red: lowering it does. A push −Δ has the color
// of its entry of Δ, so blue means “more of this” wherever it is shown. Each half of a scale differs in lightness, and the
// halves differ with any color vision.

import { isDark } from "./theme.js";

/** @typedef {[number, number, number]} RGB */
/** @typedef {"a" | "delta" | "size"} Kind */

/** Of 0, and by kind: halfway below 0 and at −1, halfway above 0 and at 1. @type {Record<string, Record<string, string[]>>} */
const STOPS = {
  light: {
    zero: ["#faf8f5"],
    a: ["#5ebeb4", "#065f56", "#f5a65c", "#963c00"],
    delta: ["#6eaae2", "#104284", "#e88296", "#8c123e"],
    size: ["#6eaae2", "#104284", "#6eaae2", "#104284"],
  },
  dark: {
    zero: ["#262321"],
    a: ["#1c7a70", "#78e8d6", "#ba5c16", "#ffc88c"],
    delta: ["#2a68b0", "#a8d6ff", "#a03254", "#ffaaba"],
    size: ["#2a68b0", "#a8d6ff", "#2a68b0", "#a8d6ff"],
  },
};

/** "#faf8f5" → 250, 248, 245 @param {string} hex */
const rgb = (hex) => /** @type {RGB} */ ([1, 3, 5].map((i) => Number.parseInt(hex.slice(i, i + 2), 16)));

const theme = () => (isDark() ? "dark" : "light");

/** x from −1 to 1 → red, green, blue
 * @param {Kind} kind
 * @param {number} x
 * @param {"light" | "dark"} shown
 * @returns {RGB} */
export function color(kind, x, shown = theme()) {
  const { zero, [kind]: scale } = STOPS[shown];
  const [start, middle, end] = [...zero, ...scale.slice(x < 0 ? 0 : 2)].map(rgb);
  const t = Math.min(1, Math.abs(x));
  const [from, to, share] = t < 0.5 ? [start, middle, 2 * t] : [middle, end, 2 * t - 1];
  return /** @type {RGB} */ (from.map((c, i) => Math.round(c + (to[i] - c) * share)));
}

const palettes = new Map();

/** All 255 colors of a kind, as pixels of a canvas, by signed byte. @param {Kind} kind @returns {Uint32Array} */
export function palette(kind) {
  const key = `${kind} ${theme()}`;
  if (!palettes.has(key)) {
    const bytes = new Uint8Array(4 * 256);
    for (let i = -127; i <= 127; i++) bytes.set([...color(kind, i / 127), 255], 4 * (i & 255));
    palettes.set(key, new Uint32Array(bytes.buffer));
  }
  return palettes.get(key);
}

/** @param {RGB} color */
export const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

/** Black or white text, whichever has more contrast on this color. @param {RGB} background */
export function inkOn(background) {
  const linear = (/** @type {number} */ c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const [r, g, b] = background.map((c) => linear(c / 255));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#000" : "#fff";
}

/** The style of an element with the background color of x. @param {Kind} kind @param {number} x */
export function filled(kind, x) {
  const c = color(kind, x);
  return { background: css(c), color: inkOn(c) };
}
