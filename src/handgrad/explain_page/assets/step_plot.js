// @ts-check
// The plot of the steps: its axis, which holds everything measured and everything predicted, and where its points are.

import { percent } from "./format.js";

const LEFT = 90,
  RIGHT = 610,
  TOP = 16,
  BOTTOM = 154;
const WIDE = 30; // if the numbers spread this much more than those measured, or from decade to decade, the axis is logarithmic

const CLOSE = 0.1; // a change is as predicted if it is off by less than this share
const APART = 18; // least distance of two labels of the axis

/** @typedef {{ loss: number, predicted: number, measured: number, rounding?: number }} Step */

/** @param {Step[]} steps */
export function plotOf(steps) {
  const points = [steps[0].loss, ...steps.map((s) => s.measured)];
  const all = [...points, ...steps.map((s) => s.predicted)];
  let least = Math.min(...all),
    most = Math.max(...all);
  const sizes = points.map(Math.abs).filter((x) => x > 0);
  const unit = Math.min(...sizes, Infinity); // below it, the logarithmic axis is nearly linear, so it holds 0 and less
  const spread = Math.max(...points) - Math.min(...points);
  const logarithmic =
    sizes.length > 0 && (Math.max(...sizes) > WIDE * unit || most - least > WIDE * Math.max(spread, unit));
  if (!logarithmic) {
    const room = 0.08 * (most - least) || 0.05 * Math.abs(most) || 1e-6;
    least = least < 0 ? least - room : Math.max(0, least - room); // a loss cannot be below 0
    most += room;
  }
  const scale = (/** @type {number} */ v) => (logarithmic ? Math.asinh(v / unit) : v);
  const y = (/** @type {number} */ v) =>
    BOTTOM - ((BOTTOM - TOP) * (scale(v) - scale(least))) / (scale(most) - scale(least) || 1);
  const x = (/** @type {number} */ i) => LEFT + ((RIGHT - LEFT) * i) / Math.max(1, points.length - 1);
  const sized = (/** @type {number} */ v) => (v < least || v > most ? [] : [{ value: v, y: y(v) }]);
  const decades = logarithmic ? decadesBetween(unit, Math.max(-least, most)) : [];
  /** @type {{ value: number, y: number }[]} */
  const ticks = []; // the ends first, then 0, then the largest decades that have room
  for (const tick of [most, least, 0, ...decades.flatMap((v) => [v, -v])].flatMap(sized))
    if (ticks.length < 2 || ticks.every((other) => Math.abs(other.y - tick.y) >= APART)) ticks.push(tick);
  return {
    least,
    most,
    logarithmic,
    ticks,
    zero: least < 0 && most > 0 ? `M${LEFT} ${y(0)}H${RIGHT}` : null,
    axis: `M${LEFT} ${TOP}V${BOTTOM}H${RIGHT}`,
    points: points.map((v, i) => ({ x: x(i), y: y(v) })),
    guesses: steps.map((s, i) => ({ x0: x(i), y0: y(points[i]), x1: x(i + 1), y1: y(s.predicted) })),
  };
}

/** The powers of 10 from `most` down to `least`. @param {number} least @param {number} most */
function decadesBetween(least, most) {
  const [low, high] = [Math.ceil(Math.log10(least)), Math.floor(Math.log10(most))];
  return Array.from({ length: Math.max(0, high - low + 1) }, (_, i) => Number(`1e${high - i}`));
}

/** What the step shows. @param {Step} step @param {string} name  what was lowered: loss or difference */
export function sentenceOf(step, name) {
  const { impossible, kind, share } = resultOf(step, name === "loss");
  const result = {
    "as predicted": `This is as predicted, within ${percent(CLOSE)}`,
    rounding: "Both changes are within the rounding of the model's numbers",
    "too large": `The ${name} rose: the step was too large`,
    curved: `That is ${percent(share)} of the prediction, because the ${name} is curved`,
    momentum: "The gradient predicted a rise: this step follows earlier gradients too, as Adam does",
  }[kind];
  return `${impossible}${result}.`;
}

/** What the step shows, in a sentence without numbers.
 * @param {Step} step @param {boolean} positive  whether what was lowered cannot be below 0 */
export function resultOf({ loss, predicted, measured, rounding = 0 }, positive = true) {
  const expected = predicted - loss,
    got = measured - loss;
  const share = expected ? got / expected : 0;
  const impossible =
    positive && predicted < 0
      ? "The prediction is below 0, which no loss can reach: so long a step leaves what the gradient describes. "
      : "";
  const within = (/** @type {number} */ x) => Math.abs(x) <= rounding;
  const kind = () => {
    if (within(expected) && within(got)) return "rounding";
    if (Math.abs(share - 1) < CLOSE) return "as predicted";
    if (expected > 0) return "momentum";
    return got > 0 ? "too large" : "curved";
  };
  return { impossible, kind: kind(), share: Math.max(0, share) };
}
