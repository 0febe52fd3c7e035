// @ts-check
// How the names of a trace and numbers inside sentences are written, as presentation/notation.py.

const SUBSCRIPTS = "₀₁₂₃₄₅₆₇₈₉";

/** ₀, ₁₂ @param {number | string} i */
export const subscript = (i) => [...String(i)].map((c) => SUBSCRIPTS[Number(c)]).join("");

/** @param {string} name @returns {[string, string]}  blocks.0.a_5 → "blocks.0." and "a_5" */
export function split(name) {
  const dot = name.lastIndexOf(".") + 1;
  return [name.slice(0, dot), name.slice(dot)];
}

/** The name of an activation's error signal: a_4 → delta_4 @param {string} name */
export function signal(name) {
  const [here, last] = split(name);
  return `${here}delta_${last.slice(2)}`;
}

/** The number of an activation or its error signal: blocks.0.a_5 → 5 @param {string} name */
export function letterOf(name) {
  const [, last] = split(name);
  return last.slice(last.indexOf("_") + 1);
}

/** The symbol of a tensor of the trace. @param {string} name */
export function symbol(name) {
  const [, last] = split(name);
  const found = /^(a|delta)_(.*)$/.exec(last);
  if (!found) return last;
  const [, kind, index] = found;
  const [, digits, word] = /^(\d*)(?:_(.*))?$/.exec(index) ?? [];
  if (!digits) return kind === "a" ? index : `Δ_${index}`;
  return (kind === "delta" ? "Δ" : kind) + subscript(digits) + (word ? `_${word}` : "");
}

/** The symbols of several tensors. @param {string[]} names */
export const symbols = (names) => names.map(symbol).join(", ");

/** As Python writes a float. @param {number} x */
const shown = (x) => (Number.isNaN(x) ? "nan" : String(x).replace("Infinity", "inf"));

/** ⟦0.0123456⟧: the page writes 0.0123 @param {number} x */
export const typeset = (x) => `⟦${shown(x)}⟧`;

/** ⟦0.4512%⟧: the page writes 45 % @param {number} fraction */
export const percent = (fraction) => `⟦${shown(fraction)}%⟧`;

/** 12,346 @param {number} n */
export const grouped = (n) => n.toLocaleString("en");

/** A name as Python quotes it. @param {string} text */
export const quoted = (text) => (text.includes("'") ? `"${text}"` : `'${text}'`);
