// @ts-check
// Judges what the reader has computed: right, right up to rounding, or which kind of mistake it is. At the first attempt the kind
// alone is said, from the second on also where it is.

import { number } from "./format.js";

const RIGHT = 5e-3; // of the sum: three digits
const TENS = 9; // powers of ten that are tried
/** @typedef {{ right: boolean, kind: string, text: string }} Verdict */

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** The number that a reader has typed: 0.5, 0,5, −1/2, 1.5e-3 or 1.5·10⁻³; NaN if it is none. @param {string} text */
export function typedNumber(text) {
  const plain = text
    .trim()
    .replace(/[−–]/g, "-")
    .replace(/[⁰¹²³⁴⁵⁶⁷⁸⁹]/g, (c) => String(SUPERSCRIPTS.indexOf(c)))
    .replace(/⁻/g, "-")
    .replace(/\s*[·*×x]\s*10\^?\s*\(?(-?\d+)\)?$/i, "e$1")
    .replace(/^([^.,]*),([^.,]*)$/, "$1.$2");
  const parts = plain.split("/");
  if (!plain || parts.length > 2 || parts.some((x) => !/^\s*[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?\s*$/i.test(x))) return NaN;
  return parts.length === 2 ? Number(parts[0]) / Number(parts[1]) : Number(plain);
}

const verdict = (/** @type {boolean} */ right, /** @type {string} */ kind, /** @type {string} */ text) => ({ right, kind, text });

/** @param {number} given @param {{ terms: { value: number, factors: { value: number }[], scale: number }[], rest: number,
 *   sum: number }} entry @param {number} attempts  this one included
 * @param {(k: number) => string} nameOf  a term, for a text @returns {Verdict} */
export function judgeSum(given, { terms, rest, sum }, attempts, nameOf) {
  if (Number.isNaN(given)) return verdict(false, "no number", "This is not a number: write 0.012, −3/4 or 1.2e-5.");
  const near = (/** @type {number} */ x, share = RIGHT) => Math.abs(given - x) <= share * Math.abs(x);
  const size = terms.reduce((total, t) => total + Math.abs(t.value), Math.abs(rest));
  if (near(sum)) return verdict(true, "right", `Right: the sum is ${number(sum, 6)}.`);
  const again = attempts > 1;
  const which = (/** @type {number} */ k, /** @type {string} */ text) => (again ? `: ${text} ${nameOf(k)}.` : ".");
  const added = terms.reduce((total, t) => total + t.factors.reduce((x, f) => x + f.value, 0), 0);
  const scale = terms[0]?.scale ?? 1;
  /** @type {[string, number, string][]} */
  const mistakes = [
    ["sign", -sum, "The size is right, the sign is not."],
    ...terms.flatMap(
      (t, k) =>
        /** @type {[string, number, string][]} */ ([
          ["missing term", sum - t.value, `A term is missing${which(k, "that of")}`],
          ["sign of a term", sum - 2 * t.value, `One term has the wrong sign${which(k, "that of")}`],
          ["doubled term", sum + t.value, `A term is counted twice${which(k, "that of")}`],
        ]),
    ),
    ["missing rest", sum - rest, "The smaller terms are missing: their sum is given in the last row."],
    ["sizes", size, "These are the sizes of the terms, added up without their signs."],
    ["added", added, "Here the factors are added: multiply the factors of every row first."],
    ["scale", sum / scale, `A factor is missing: every product is also multiplied by ${number(scale)}.`],
    ...Array.from({ length: 2 * TENS + 1 }, (_, i) => i - TENS).map(
      (k) =>
        /** @type {[string, number, string]} */ (["power of ten", sum * 10 ** k, "The digits are right, the power of ten is not."]),
    ),
  ];
  const better = mistakes
    .filter(([, x]) => Math.abs(x - sum) > RIGHT * Math.abs(sum))
    .filter(([, x]) => Math.abs(given - x) <= RIGHT * Math.max(Math.abs(x), 1e-3 * size))
    .sort((a, b) => Math.abs(given - a[1]) - Math.abs(given - b[1]))[0];
  const off = Math.abs(given - sum);
  if (off <= RIGHT * size && !(better && Math.abs(given - better[1]) < off / 10))
    return verdict(
      true,
      "rounding",
      `Right up to rounding: the sum is ${number(sum, 6)}. Terms of both signs cancel, so early rounding costs digits.`,
    );
  if (better) return verdict(false, better[0], better[2]);
  const compare = again ? " Show the answer to compare the products." : "";
  return verdict(false, "other", `Not yet: your number is ${given > sum ? "above" : "below"} the sum.${compare}`);
}

/** @param {number} given  1, −1 or 0 @param {{ terms: { value: number }[], rest: number, sum: number }} entry @returns {Verdict} */
export function judgeSign(given, { terms, rest, sum }) {
  const values = [...terms.map((t) => t.value), rest];
  const part = (/** @type {number} */ sign) => values.filter((x) => x * sign > 0).reduce((total, x) => total + x, 0);
  const why = `the terms above 0 add up to ${number(part(1))}, those below 0 to ${number(part(-1))}`;
  const right = given === Math.sign(sum);
  return verdict(right, right ? "right" : "sign", right ? `Right: ${why}.` : `The other way round: ${why}.`);
}

/** @param {number[]} given @param {number[]} shape @param {string} rows  what a row is, and @param {string} columns a column
 * @returns {Verdict} */
export function judgeShape(given, shape, rows, columns) {
  const said = `one row for every ${rows}, one column for every ${columns}`;
  if (given.some((x) => !Number.isInteger(x) || x < 1)) return verdict(false, "no number", "A shape is two whole numbers above 0.");
  if (given[0] === shape[0] && given[1] === shape[1])
    return verdict(true, "right", `Right: ${shape[0].toLocaleString("en")} × ${shape[1].toLocaleString("en")}, ${said}.`);
  if (given[0] === shape[1] && given[1] === shape[0])
    return verdict(false, "transposed", `Transposed: rows and columns are exchanged. It has ${said}.`);
  const wrong = given.map((n, i) => n !== shape[i]);
  const text = wrong[0] && wrong[1] ? "Neither number is right" : `The number of ${wrong[0] ? "rows" : "columns"} is not right`;
  return verdict(false, wrong[0] && wrong[1] ? "shape" : wrong[0] ? "rows" : "columns", `${text}. It has ${said}.`);
}
