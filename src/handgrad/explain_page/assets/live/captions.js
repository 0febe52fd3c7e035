// @ts-check
// The sentence under each picture, computed from the data at hand: the sentences of presentation/captions.py.

import { quote } from "../format.js";
import { matrix } from "../engine/matrix.js";
import { chance } from "./chances.js";
import { argmax, columnOf, furthest, largest, norm, range, rowNorms, rowOf, sum } from "./matrices.js";
import { grouped, percent, typeset } from "./notation.js";

/** @typedef {import("../engine/matrix.js").Matrix} Matrix */

/** ‘token’ (position 3) @param {string[]} labels @param {number} t */
export const at = (labels, t) => `${quote(labels[t])} (position ${t + 1})`;

/** @param {Matrix} x @param {string[]} labels */
export function aboutActivations(x, labels) {
  const norms = rowNorms(x),
    t = argmax(norms);
  const feature = argmax(range(x.cols).map((j) => largest(columnOf(x, j))));
  const column = columnOf(x, feature);
  return (
    `The longest row is ${at(labels, t)}, with length ${typeset(norms[t])}. The value furthest from 0 is in` +
    ` feature ${feature}: ${typeset(column[furthest(column)])}.`
  );
}

/** Logits or probabilities. @param {Matrix} x @param {string[]} labels @param {(id: number) => string} tokenText
 * @param {string} what */
export function aboutScores(x, labels, tokenText, what) {
  const place = argmax(x.data),
    most = x.data[place];
  const [t, column] = [Math.floor(place / x.cols), place % x.cols];
  const ties = x.data.filter((value) => value === most).length - 1;
  return (
    `The highest ${what} is ${typeset(most)}, for ${quote(tokenText(column))} after ${at(labels, t)}` +
    `${shared(ties)}. A column that is high in every row is a token that the model expects everywhere.`
  );
}

/** That equal numbers have equal ranks. @param {number} ties */
const shared = (ties, one = "entry", many = "entries") => (ties ? ` and ${grouped(ties)} other ${ties === 1 ? one : many}` : "");

/** An error signal; `depends` says whether what is explained depends on a row here.
 * @param {Matrix} x @param {string[]} labels @param {(row: number) => boolean} depends */
export function aboutError(x, labels, depends) {
  const norms = rowNorms(x),
    total = norm(norms);
  if (total === 0) return "No error arrives here.";
  const t = argmax(norms),
    share = norms[t] ** 2 / total ** 2;
  const ties = norms.filter((size) => size === norms[t]).length - 1;
  let text = `The largest error arrives at ${at(labels, t)}${shared(ties, "token", "tokens")}:`;
  text += ` ${percent(share)} of all squared error here${ties ? ", at each" : ""}.`;
  const zero = range(labels.length).filter((i) => norms[i] === 0);
  const [outside, rounded] = [false, true].map((reached) => zero.filter((i) => depends(i) === reached));
  if (outside.length) {
    const them = outside.length === 1 ? "it" : "them";
    text += ` No error reaches ${listed(outside, labels)}: what is explained does not depend on ${them} here.`;
  }
  return rounded.length ? `${text} It is 0, as computed, at ${listed(rounded, labels)}.` : text;
}

/** These tokens if they are few; else how many, and the last of them. @param {number[]} rows @param {string[]} labels */
function listed(rows, labels, most = 3) {
  if (rows.length <= most) return rows.map((t) => at(labels, t)).join(", ");
  return `${rows.length} of the ${labels.length} tokens, the last of them ${at(labels, rows[rows.length - 1])}`;
}

/** @param {Map<string, number>} norms @param {Map<string, number>} sizes  of the parameters, by their symbols */
export function aboutGradients(norms, sizes) {
  if (!norms.size) return "No parameter is trained here.";
  const [name, size] = most(norms);
  if (!size) return "Every gradient here is 0, as computed.";
  let text = `The largest gradient here is ∂${name}, with length ${typeset(size)}`;
  const whole = sizes.get(name);
  if (whole) text += `, ${typeset(size / whole)} times the length of ${name} itself`;
  const zero = [...norms].filter(([, length]) => length === 0).map(([symbol]) => `∂${symbol}`);
  return text + (zero.length ? `. Exactly 0: ${zero.join(", ")}.` : ".");
}

/** The first entry with the largest value, or the smallest. @param {Map<string, number>} lengths @param {number} sign
 * @returns {[string, number]} */
const most = (lengths, sign = 1) => [...lengths].reduce((best, one) => (sign * one[1] > sign * best[1] ? one : best));

/** @param {Matrix} rho @param {Matrix} sent @param {string[]} labels */
export function aboutAttention(rho, sent, labels) {
  const n = labels.length;
  // heads that find no match attend to the first token
  const others = matrix(n, n, rho.data.map((value, k) => (k % n === Math.floor(k / n) || (n > 1 && k % n === 0) ? 0 : value)));
  const between = matrix(n, n, sent.data.map((value, k) => (k % n === Math.floor(k / n) ? 0 : value)));
  let text = "No attention goes to any token but the first and the token itself.";
  const place = argmax(others.data);
  if (others.data[place] > 0)
    text =
      "The strongest attention, apart from the first token and the token itself:" +
      ` ${at(labels, Math.floor(place / n))} takes ${percent(rho.data[place])} from ${at(labels, place % n)}.`;
  const error = argmax(between.data);
  if (between.data[error] > 0)
    text +=
      ` The largest error between two tokens goes from ${at(labels, Math.floor(error / n))} back to` +
      ` ${at(labels, error % n)}: length ${typeset(between.data[error])}.`;
  const first = n > 1 ? sum(range(n - 1).map((t) => rowOf(rho, t + 1)[0])) / (n - 1) : 0;
  if (first > 0.3)
    text +=
      ` On average over the rows after the first, which can attend only to itself, ${percent(first)} of the attention` +
      " goes to the first token.";
  return text;
}

export const ABOUT_SENT =
  "From each token (row) to each other token (column), through values and keys: length of ρ Δ wᵥᵗ + Δ_raw q wₖᵗ.";

/** @param {number} value @param {number} query @param {number} key */
export function aboutBranches(value, query, key) {
  const lengths = new Map([["values", value], ["queries", query], ["keys", key]]);
  const [name, size] = most(lengths);
  if (!size) return "No error flows back through this head.";
  const rest = [...lengths].filter(([other]) => other !== name).map(([other, x]) => `${typeset(x)} through the ${other}`);
  return `The largest part of this head's error flows through the ${name}: ${typeset(size)}, against ${rest.join(" and ")}.`;
}

/** −log p of every target. @param {string[]} labels @param {string[]} targets @param {number[]} losses */
export function aboutLoss(labels, targets, losses) {
  const worst = argmax(losses),
    best = argmax(losses.map((x) => -x));
  const one = (/** @type {number} */ t) => {
    const others = shared(losses.filter((x) => x === losses[t]).length - 1, "target", "targets");
    return `${quote(targets[t])} after ${at(labels, t)}${others}, with ${percent(chance(-losses[t]))}`;
  };
  if (losses[worst] === losses[best] && losses.length > 1) {
    const computed = losses[best] ? "" : ", as computed";
    return `All ${losses.length} targets were equally probable${computed}: ${percent(chance(-losses[best]))}.`;
  }
  if (losses.length === 1) return `The only target is ${one(0)}.`;
  return (
    `The biggest surprise is ${one(worst)}: −log p = ${typeset(losses[worst])}. The best prediction is ${one(best)}:` +
    ` −log p = ${typeset(losses[best])}.`
  );
}

/** The push on the logits of a row, −Δ₁₂ at its target; the loss is a mean over that number of targets.
 * @param {any} row  a position @param {number} push @param {number} targets */
export function aboutPush(row, push, targets) {
  const { target, probability: p } = row;
  const share = targets === 1 ? "1 − p" : `(1 − p)/${grouped(targets)}`;
  const text =
    `After ${quote(row.token)}: ${quote(target)} had probability p = ${percent(p)}, so its logit` +
    ` is pushed up by ${share} = ${typeset(push)}${push ? "" : ", as computed"}`;
  if (row.rank === 1) return `${text}. It was already the first choice${together(row.ties)}.`;
  const [rival] = row.top;
  return `${text}. Pushed down most is ${quote(rival.word)}, which had ${percent(rival.p)}.`;
}

/** @param {number} ties */
const together = (ties) => (ties ? `, together with ${grouped(ties)} equally probable ${ties === 1 ? "one" : "ones"}` : "");

/** @param {Map<string, number>} norms  by what the reader calls a parameter */
export function aboutGroups(norms) {
  const nonzero = new Map([...norms].filter(([, size]) => size > 0));
  if (!nonzero.size) return "Every gradient is 0, as computed.";
  const [large, small] = [most(nonzero), most(nonzero, -1)];
  return (
    `The largest gradient is ∂${large[0]} (${typeset(large[1])}), the smallest nonzero one is ∂${small[0]}` +
    ` (${typeset(small[1])}).`
  );
}

/** @param {string} label @param {string} first @param {number} probability @param {string | null} target
 * @param {number | null} share */
export function aboutLens(label, first, probability, target, share) {
  const text = `Read out here, the model would predict ${quote(first)} after ${quote(label)}, with ${percent(probability)}`;
  if (target === null) return `${text}. The last position has no target.`;
  return `${text}. The target ${quote(target)} has ${percent(share ?? 0)}.`;
}

/** @param {string[]} labels @param {number} t @param {string} other @param {number} change @param {number} measured */
export const aboutSwaps = (labels, t, other, change, measured) =>
  `The best single replacement, to first order: ${quote(other)} instead of ${at(labels, t)} would change the objective` +
  ` by ${typeset(change)}. Measured: ${typeset(measured)}. For so large a step an estimate can be wrong,` +
  " even in sign.";
