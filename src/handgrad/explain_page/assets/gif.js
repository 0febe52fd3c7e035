// @ts-check
// Animated GIF (GIF89a): one table of 255 colors, LZW, and of every frame only the rectangle that has changed.

const TRANSPARENT = 255; // the index of what stays as in the frame before
const MOST_CODES = 4096;

/** The most frequent colors of some frames, and a function from a pixel to the index of the nearest one.
 * @param {Uint32Array[]} frames  pixels as a canvas has them */
export function paletteOf(frames) {
  /** @type {Map<number, number>} */
  const counts = new Map();
  for (const pixels of frames) for (const pixel of pixels) counts.set(pixel, (counts.get(pixel) ?? 0) + 1);
  const colors = [...counts].sort((a, b) => b[1] - a[1]).slice(0, TRANSPARENT).map(([pixel]) => pixel);
  /** @type {Map<number, number>} */
  const known = new Map(colors.map((pixel, i) => [pixel, i]));
  const indexOf = (/** @type {number} */ pixel) => {
    let found = known.get(pixel);
    if (found === undefined) known.set(pixel, (found = nearest(pixel, colors)));
    return found;
  };
  return { colors, indexOf };
}

const channels = (/** @type {number} */ pixel) => [pixel & 255, (pixel >> 8) & 255, (pixel >> 16) & 255];

/** @param {number} pixel @param {number[]} colors */
function nearest(pixel, colors) {
  const [r, g, b] = channels(pixel);
  let best = 0,
    least = Infinity;
  colors.forEach((color, i) => {
    const distance = (r - (color & 255)) ** 2 + (g - ((color >> 8) & 255)) ** 2 + (b - ((color >> 16) & 255)) ** 2;
    if (distance < least) [best, least] = [i, distance];
  });
  return best;
}

/** Frames are added one after the other; the file repeats for ever.
 * @param {number} width @param {number} height @param {ReturnType<typeof paletteOf>} palette */
export function gifOf(width, height, { colors, indexOf }) {
  const word = (/** @type {number} */ x) => [x & 255, x >> 8];
  const text = (/** @type {string} */ x) => [...x].map((c) => c.charCodeAt(0));
  const table = new Uint8Array(768);
  colors.forEach((pixel, i) => table.set(channels(pixel), 3 * i));
  /** @type {(Uint8Array | number[])[]} */
  const parts = [
    [...text("GIF89a"), ...word(width), ...word(height), 0xf7, 0, 0],
    table,
    [0x21, 0xff, 11, ...text("NETSCAPE2.0"), 3, 1, 0, 0, 0],
  ];
  let before = /** @type {Uint32Array | null} */ (null);

  /** @param {Uint32Array} pixels @param {number} delay  in hundredths of a second */
  function add(pixels, delay) {
    const { x, y, w, h } = before ? changed(before, pixels, width) : { x: 0, y: 0, w: width, h: height };
    const indices = new Uint8Array(w * h);
    for (let i = 0, k = 0; i < h; i++)
      for (let j = 0; j < w; j++, k++) {
        const at = (y + i) * width + x + j;
        indices[k] = before && before[at] === pixels[at] ? TRANSPARENT : indexOf(pixels[at]);
      }
    parts.push([0x21, 0xf9, 4, 0x05, ...word(delay), TRANSPARENT, 0]); // the frame stays below the next one
    parts.push([0x2c, ...word(x), ...word(y), ...word(w), ...word(h), 0, 8], blocks(compressed(indices)), [0]);
    before = pixels.slice();
  }

  const bytes = () => {
    const all = [...parts, [0x3b]];
    const found = new Uint8Array(all.reduce((sum, part) => sum + part.length, 0));
    let at = 0;
    for (const part of all) {
      found.set(part, at);
      at += part.length;
    }
    return found;
  };
  return { add, bytes };
}

/** The rectangle that holds every pixel that differs; one pixel if none does.
 * @param {Uint32Array} before @param {Uint32Array} now @param {number} width */
function changed(before, now, width) {
  let [left, right, top, bottom] = [width, -1, -1, -1];
  for (let i = 0; i < now.length; i++) {
    if (before[i] === now[i]) continue;
    const x = i % width,
      y = (i - x) / width;
    if (top < 0) top = y;
    bottom = y;
    if (x < left) left = x;
    if (x > right) right = x;
  }
  return right < 0 ? { x: 0, y: 0, w: 1, h: 1 } : { x: left, y: top, w: right - left + 1, h: bottom - top + 1 };
}

/** LZW with codes of 9 to 12 bits. @param {Uint8Array} indices */
function compressed(indices) {
  const CLEAR = 256,
    END = 257;
  const out = [];
  let held = 0,
    bits = 0,
    size = 9,
    next = END + 1;
  /** @type {Map<number, number>} */
  let codes = new Map(); // a code and the index after it → the code of both
  const write = (/** @type {number} */ code) => {
    held |= code << bits;
    bits += size;
    for (; bits >= 8; bits -= 8, held >>>= 8) out.push(held & 255);
  };
  write(CLEAR);
  let prefix = indices[0];
  for (let i = 1; i < indices.length; i++) {
    const key = (prefix << 8) | indices[i],
      code = codes.get(key);
    if (code !== undefined) {
      prefix = code;
      continue;
    }
    write(prefix);
    prefix = indices[i];
    if (next < MOST_CODES) {
      codes.set(key, next);
      if (next++ === 1 << size) size++; // the decoder knows a code one step later
      continue;
    }
    write(CLEAR);
    codes = new Map();
    [size, next] = [9, END + 1];
  }
  write(prefix);
  if (next === 1 << size && size < 12) size++;
  write(END);
  if (bits) out.push(held & 255);
  return Uint8Array.from(out);
}

/** In pieces of at most 255 bytes, each after its length. @param {Uint8Array} bytes */
function blocks(bytes) {
  const found = [];
  for (let i = 0; i < bytes.length; i += 255) {
    const part = bytes.subarray(i, i + 255);
    found.push(part.length, ...part);
  }
  return Uint8Array.from(found);
}
