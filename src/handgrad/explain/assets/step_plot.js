// @ts-check
// The plot of the steps: its axis, and where its points are. The axis follows what was measured; a prediction outside it is
// drawn at the edge, so that one bad prediction does not flatten the curve.

const LEFT = 90,
  RIGHT = 610,
  TOP = 16,
  BOTTOM = 154;
const DECADES = 30; // from this ratio of the largest to the smallest loss on, the axis is logarithmic

/** @typedef {{ loss: number, predicted: number, measured: number }} Step */

/** @param {Step[]} steps */
export function plotOf(steps) {
  const points = [steps[0].loss, ...steps.map((s) => s.measured)];
  let least = Math.min(...points),
    most = Math.max(...points);
  const logarithmic = least > 0 && most / least > DECADES;
  if (!logarithmic) {
    const room = 0.15 * (most - least) || 0.05 * Math.abs(most) || 1e-6;
    least = Math.max(Math.min(0, least), least - room); // a loss cannot be below 0
    most += room;
  }
  const scale = (/** @type {number} */ v) => (logarithmic ? Math.log(Math.max(v, 1e-300)) : v);
  const place = (/** @type {number} */ v) =>
    BOTTOM - ((BOTTOM - TOP) * (scale(v) - scale(least))) / (scale(most) - scale(least) || 1);
  const y = (/** @type {number} */ v) => Math.max(TOP - 6, Math.min(BOTTOM + 6, place(v)));
  const x = (/** @type {number} */ i) => LEFT + ((RIGHT - LEFT) * i) / Math.max(1, points.length - 1);
  return {
    least,
    most,
    logarithmic,
    axis: `M${LEFT} ${TOP}V${BOTTOM}H${RIGHT}`,
    points: points.map((v, i) => ({ x: x(i), y: y(v) })),
    guesses: steps.map((s, i) => ({
      x0: x(i),
      y0: y(points[i]),
      x1: x(i + 1),
      y1: y(s.predicted),
      outside: s.predicted < least || s.predicted > most,
    })),
  };
}

/** What the step shows, in a sentence without numbers.
 * @param {Step} step @param {boolean} positive  whether what was lowered cannot be below 0 */
export function resultOf({ loss, predicted, measured }, positive = true) {
  const expected = predicted - loss,
    got = measured - loss;
  const share = expected ? got / expected : 0;
  const impossible =
    positive && predicted < 0
      ? "The prediction is below 0, which no loss can reach: so long a step leaves what the gradient describes. "
      : "";
  if (share > 0.9 && share < 1.1) return { impossible, kind: "as predicted", share };
  return { impossible, kind: got > 0 ? "too large" : "curved", share: Math.max(0, share) };
}
