// @ts-check
// The plot of the steps: its axis, which holds everything measured and everything predicted, and where its points are.

const LEFT = 90,
  RIGHT = 610,
  TOP = 16,
  BOTTOM = 154;
const WIDE = 30; // if the numbers spread this much more than those measured, or from decade to decade, the axis is logarithmic

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
  return {
    least,
    most,
    logarithmic,
    axis: `M${LEFT} ${TOP}V${BOTTOM}H${RIGHT}`,
    points: points.map((v, i) => ({ x: x(i), y: y(v) })),
    guesses: steps.map((s, i) => ({ x0: x(i), y0: y(points[i]), x1: x(i + 1), y1: y(s.predicted) })),
  };
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
    if (share > 0.9 && share < 1.1) return "as predicted";
    if (expected > 0) return "momentum";
    return got > 0 ? "too large" : "curved";
  };
  return { impossible, kind: kind(), share: Math.max(0, share) };
}
