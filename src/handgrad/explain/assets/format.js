// How numbers, shapes and tokens are written: all text of the page that shows one comes from here.

const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

// `digits` significant digits: 0.0123, −7, 1.50·10⁻⁷
export function number(x, digits = 3) {
  if (x === null || x === undefined) return "–";
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e-3 && size < 1e4) return String(Number(x.toPrecision(digits))).replace("-", "−");
  const [mantissa, exponent] = x.toExponential(digits - 1).split("e");
  const power = [...String(Number(exponent))].map((c) => SUPERSCRIPTS[c]).join("");
  return `${mantissa.replace("-", "−")}·10${power}`;
}

// The value under the pointer, with all digits of a float32.
export const exact = (x) => String(Number(x.toPrecision(9)));
export const count = (n, noun = "") => `${n.toLocaleString("en")}${noun && ` ${noun}${n === 1 ? "" : "s"}`}`;
export const percent = (p) => (p >= 0.0995 ? `${Math.round(100 * p)} %` : `${Number((100 * p).toPrecision(2))} %`);
// 24 × 1,024
export const shapeOf = (shape) => shape.map((n) => n.toLocaleString("en")).join(" × ");

// A token with spaces, line ends and control characters made visible.
export function visible(label) {
  return [...label]
    .map((c) => {
      const code = c.codePointAt(0);
      if (c === " ") return "␣";
      if (c === "\n") return "⏎";
      if (c === "\t") return "⇥";
      if (code < 32) return String.fromCodePoint(0x2400 + code);
      if (code === 127) return "␡";
      if ((code >= 0x200b && code <= 0x200f) || (code >= 0x202a && code <= 0x202e) || code === 0xfeff || (code >= 0x80 && code < 0xa0))
        return `⟨${code.toString(16)}⟩`;
      return c;
    })
    .join("");
}
