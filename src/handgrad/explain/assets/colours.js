// The colours of the heat maps: one pair of scales for activations (a), one for errors (delta), in both themes.

// Per kind one scale for negative and one for positive values: they differ in lightness, and with any colour vision.

const STOPS = {
  light: {
    zero: [250, 248, 245],
    a: [[[94, 190, 180], [6, 95, 86]], [[245, 166, 92], [150, 60, 0]]],
    delta: [[[232, 130, 150], [140, 18, 62]], [[110, 170, 226], [16, 66, 132]]],
  },
  dark: {
    zero: [38, 35, 33],
    a: [[[28, 122, 112], [120, 232, 214]], [[186, 92, 22], [255, 200, 140]]],
    delta: [[[160, 50, 84], [255, 170, 186]], [[42, 104, 176], [168, 214, 255]]],
  },
};

const isDark = () => document.documentElement.dataset.theme === "dark";

// x from −1 to 1 → red, green, blue
export function colour(kind, x) {
  const { zero, [kind]: scales } = STOPS[isDark() ? "dark" : "light"];
  const [middle, end] = scales[x < 0 ? 0 : 1];
  const t = Math.min(1, Math.abs(x));
  const [from, to, share] = t < 0.5 ? [zero, middle, 2 * t] : [middle, end, 2 * t - 1];
  return from.map((c, i) => Math.round(c + (to[i] - c) * share));
}

// All 255 colours of a kind, as pixels of a canvas.
const palettes = new Map();
export function palette(kind) {
  const key = `${kind} ${isDark()}`;
  if (!palettes.has(key)) {
    const bytes = new Uint8Array(4 * 256);
    for (let i = -127; i <= 127; i++) bytes.set([...colour(kind, i / 127), 255], 4 * (i & 255));
    palettes.set(key, new Uint32Array(bytes.buffer));
  }
  return palettes.get(key);
}

export const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;

// Black or white text, whichever has more contrast on this colour.
function inkOn([r, g, b]) {
  const [x, y, z] = [r, g, b].map((c) => (c / 255 <= 0.03928 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * x + 0.7152 * y + 0.0722 * z > 0.18 ? "#000" : "#fff";
}

// Give an element the background colour of x and readable text on it.
export function paint(node, kind, x) {
  const c = colour(kind, x);
  node.style.background = css(c);
  node.style.color = inkOn(c);
}
