// @ts-check
// The colors of the pictures, in both themes. Three kinds: activations ("a"), error signals ("delta"), lengths ("size").
// An entry of Δ below 0 is blue: raising it lowers the loss. Above 0 it is red: lowering it does. A push −Δ has the color
// of its entry of Δ, so blue means “more of this” wherever it is shown. Each half of a scale differs in lightness, and the
// halves differ with any color vision.

import { isDark } from "./theme.js";

/** @typedef {[number, number, number]} RGB */
/** @typedef {"a" | "delta" | "size"} Kind */

/** @type {Record<"light" | "dark", { zero: RGB } & Record<Kind, [[RGB, RGB], [RGB, RGB]]>>} */
const STOPS = {
  light: {
    zero: [250, 248, 245],
    a: [
      [
        [94, 190, 180],
        [6, 95, 86],
      ],
      [
        [245, 166, 92],
        [150, 60, 0],
      ],
    ],
    delta: [
      [
        [110, 170, 226],
        [16, 66, 132],
      ],
      [
        [232, 130, 150],
        [140, 18, 62],
      ],
    ],
    size: [
      [
        [110, 170, 226],
        [16, 66, 132],
      ],
      [
        [110, 170, 226],
        [16, 66, 132],
      ],
    ],
  },
  dark: {
    zero: [38, 35, 33],
    a: [
      [
        [28, 122, 112],
        [120, 232, 214],
      ],
      [
        [186, 92, 22],
        [255, 200, 140],
      ],
    ],
    delta: [
      [
        [42, 104, 176],
        [168, 214, 255],
      ],
      [
        [160, 50, 84],
        [255, 170, 186],
      ],
    ],
    size: [
      [
        [42, 104, 176],
        [168, 214, 255],
      ],
      [
        [42, 104, 176],
        [168, 214, 255],
      ],
    ],
  },
};

const theme = () => (isDark() ? "dark" : "light");

/** x from −1 to 1 → red, green, blue
 * @param {Kind} kind
 * @param {number} x
 * @param {"light" | "dark"} shown
 * @returns {RGB} */
export function color(kind, x, shown = theme()) {
  const { zero, [kind]: scales } = STOPS[shown];
  const [middle, end] = scales[x < 0 ? 0 : 1];
  const t = Math.min(1, Math.abs(x));
  const [from, to, share] = t < 0.5 ? [zero, middle, 2 * t] : [middle, end, 2 * t - 1];
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
