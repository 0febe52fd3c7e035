// @ts-check
// SHA-256 of a text in UTF-8. The browser's own exists only on pages that it calls secure, which a page in a local network is not.

const PRIMES = [];
for (let n = 2; PRIMES.length < 64; n++) if (PRIMES.every((p) => n % p)) PRIMES.push(n);
const fraction = (/** @type {number} */ x) => ((x - Math.floor(x)) * 2 ** 32) >>> 0;
const CONSTANTS = PRIMES.map((p) => fraction(Math.cbrt(p)));
const START = PRIMES.slice(0, 8).map((p) => fraction(Math.sqrt(p)));
const turned = (/** @type {number} */ x, /** @type {number} */ n) => (x >>> n) | (x << (32 - n));

/** @param {string} text @returns {string} 64 hexadecimal digits */
export function sha256(text) {
  const given = new TextEncoder().encode(text);
  const bytes = new Uint8Array(64 * Math.ceil((given.length + 9) / 64));
  bytes.set(given);
  bytes[given.length] = 0x80;
  const view = new DataView(bytes.buffer);
  view.setUint32(bytes.length - 8, Math.floor(given.length / 2 ** 29));
  view.setUint32(bytes.length - 4, (given.length * 8) >>> 0);
  let state = START;
  for (let at = 0; at < bytes.length; at += 64) state = mixed(state, view, at);
  return state.map((x) => x.toString(16).padStart(8, "0")).join("");
}

/** @param {number[]} state @param {DataView} view @param {number} at */
function mixed(state, view, at) {
  const w = Array.from({ length: 16 }, (_, i) => view.getUint32(at + 4 * i));
  for (let i = 16; i < 64; i++) {
    const [x, y] = [w[i - 15], w[i - 2]];
    const s0 = turned(x, 7) ^ turned(x, 18) ^ (x >>> 3),
      s1 = turned(y, 17) ^ turned(y, 19) ^ (y >>> 10);
    w[i] = (w[i - 16] + s0 + w[i - 7] + s1) >>> 0;
  }
  let [a, b, c, d, e, f, g, h] = state;
  for (let i = 0; i < 64; i++) {
    const s1 = turned(e, 6) ^ turned(e, 11) ^ turned(e, 25),
      s0 = turned(a, 2) ^ turned(a, 13) ^ turned(a, 22);
    const one = (h + s1 + ((e & f) ^ (~e & g)) + CONSTANTS[i] + w[i]) >>> 0;
    const two = (s0 + ((a & b) ^ (a & c) ^ (b & c))) >>> 0;
    [a, b, c, d, e, f, g, h] = [(one + two) >>> 0, a, b, c, (d + one) >>> 0, e, f, g];
  }
  return [a, b, c, d, e, f, g, h].map((x, i) => (x + state[i]) >>> 0);
}
