// @ts-check
// How numbers, shapes and tokens are written: all text of the page that shows one comes from here.

const SUPERSCRIPTS = "⁰¹²³⁴⁵⁶⁷⁸⁹";

/** `digits` significant digits: 0.0123, −7, 12,300, 1.50·10⁻⁷; – if there is no number.
 * @param {number | null | undefined} x @param {number} digits */
export function number(x, digits = 3) {
  if (x === null || x === undefined || Number.isNaN(x)) return "–";
  if (x < 0) return `−${number(-x, digits)}`;
  if (x === 0 || x === Infinity) return x ? "∞" : "0";
  const rounded = Number(x.toPrecision(digits));
  if (rounded >= 1e-3 && rounded < 1000) return String(rounded);
  if (rounded >= 1000 && rounded < 1e5) return Math.round(x).toLocaleString("en");
  const [mantissa, exponent] = x.toExponential(digits - 1).split("e");
  return `${mantissa}·10${superscript(Number(exponent))}`;
}

/** @param {number} n */
const superscript = (n) => (n < 0 ? "⁻" : "") + [...String(Math.abs(n))].map((c) => SUPERSCRIPTS[Number(c)]).join("");

/** A change, with its sign: +0.12, −0.12, 0 @param {number | null | undefined} x @param {number} digits */
export const signed = (x, digits = 3) => (x && x > 0 ? `+${number(x, digits)}` : number(x, digits));

/** The value under the pointer, with all digits of a float32. @param {number} x */
export const exact = (x) => String(Number(x.toPrecision(9)));

/** 1 step, 2,000 steps @param {number} n @param {string} noun */
export const count = (n, noun = "") => `${n.toLocaleString("en")}${noun && ` ${noun}${n === 1 ? "" : "s"}`}`;

const FEW = 1e-5; // a share below is not written out: 10⁻⁴³ % says no more than “less than 0.001 %”

/** 45 %, 0.19 %, < 0.001 %; – if there is no number. @param {number | null | undefined} p */
export function percent(p) {
  if (p === null || p === undefined) return "–";
  if (p && Math.abs(p) < FEW) return `${p < 0 ? "> −" : "< "}${number(100 * FEW)} %`;
  if (p > 0.9995 && p < 1) return "> 99.9 %";
  return `${number(100 * p, Math.abs(p) >= 0.995 ? 3 : 2)} %`;
}

/** p = 45 %, p < 0.001 % @param {number} p */
export const probability = (p) => relation(`p = ${percent(p)}`);

const relation = (/** @type {string} */ text) => text.replaceAll("= <", "<").replaceAll("= >", ">");

/** The probability of a token with this loss, which is never 0. @param {number} loss */
export const chance = (loss) => Math.max(Math.exp(-loss), Number.MIN_VALUE);

/** A sentence of the server with its marked numbers written: ⟦0.0123456⟧, ⟦0.4512%⟧ (see presentation/notation.py)
 * @param {string} text */
export const written = (text) =>
  relation(
    text.replace(/⟦(-?[\d.e+-]+|-?inf|nan)(%?)⟧/g, (_, x, share) =>
      (share ? percent : number)(Number(x.replace("inf", "Infinity"))),
    ),
  );

/** 24 × 1,024 @param {number[]} shape */
export const shapeOf = (shape) => shape.map((n) => n.toLocaleString("en")).join(" × ");

/** A token with its spaces and control characters visible. @param {string} text */
export const visible = (text) => [...text].map(visibleCharacter).join("");

const ALONE = new Map([
  [" ", "a space"],
  ["\n", "a line break"],
  ["\t", "a tab"],
]);

/** A token in a sentence, as captions.quote: ‘token’ without spaces around it; one that is a space, by its name. @param {string} text */
export function quote(text) {
  const word = text.replace(/^ +| +$/g, "");
  return ALONE.get(text) ?? `‘${word ? word.split(" ").map(visible).join(" ") : visible(text)}’`;
}

const NAMED = new Map([
  [" ", "␣"],
  ["\n", "⏎"],
  ["\t", "⇥"],
  ["\x7f", "␡"],
]);

// controls, marks of direction and joining, private use (no font knows it), half a character, spaces that are no “ ”
const UNSEEN = /[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Z}]/u;

/** As captions.visible. @param {string} c */
function visibleCharacter(c) {
  const code = c.codePointAt(0) ?? 0;
  if (NAMED.has(c)) return NAMED.get(c);
  if (code < 32) return String.fromCodePoint(0x2400 + code);
  return UNSEEN.test(c) ? `⟨${code.toString(16)}⟩` : c;
}

/** At most `most` characters. @param {string} text @param {number} most */
export const fit = (text, most) => ([...text].length > most ? `${[...text].slice(0, most - 1).join("")}…` : text);
