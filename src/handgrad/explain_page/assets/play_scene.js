// @ts-check
// One moment of “Play the pass”, drawn on a canvas: what the pulse has passed is lit, where it is now is a dot.

import { number } from "./format.js";
import { isFan, slotOf, WIDE } from "./play_plan.js";

const NUMBERED = 16; // at most so many heads have room for their numbers
const FLASH = 0.3; // seconds for which a sum shines
const COLORS = ["card", "ink", "soft", "line", "forward", "forward-line", "backward", "backward-line", "block", "block-line"];

/** The colors of the page's theme. @returns {Record<string, string>} */
export function themeColors() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(COLORS.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

/** The stop that was reached last. @param {import("./play_plan.js").Plan} plan @param {number} t */
export const stopAt = ({ stops }, t) => stops.filter(({ at }) => at <= t + 1e-9).at(-1) ?? stops[0];

/** @param {CanvasRenderingContext2D} context @param {import("./play_plan.js").Plan} plan @param {number} t  seconds
 * @param {Record<string, string>} colors */
export function drawScene(context, plan, t, colors) {
  context.fillStyle = colors.card;
  context.fillRect(0, 0, WIDE, plan.high);
  context.lineCap = "round";
  drawBlocks(context, plan, colors);
  for (const way of plan.ways) trace(context, way, 1, { color: colors.line, width: Math.max(1, way.width * 0.6), light: 1 });
  for (const way of plan.ways) {
    const share = shareOf(way, t);
    if (share > 0) trace(context, way, share, { color: colors[`${way.kind}-line`], width: way.width, light: way.light });
  }
  drawRows(context, plan, t, colors);
  for (const way of plan.ways) {
    const share = shareOf(way, t);
    if (share > 0 && share < 1) dot(context, pointOn(way.points, share), way, colors);
  }
  for (const { row, kind, at, meets } of plan.stops) {
    const age = (t - at) / FLASH;
    if (meets && age >= 0 && age < 1) ring(context, joint(kind), row.y, 5 + 12 * age, 1 - age, colors[kind]);
  }
  say(context, plan, stopAt(plan, t), colors);
}

const joint = (/** @type {string} */ kind) => (kind === "forward" ? 26 : WIDE - 26);

/** How much of a way the pulse has gone. @param {{ from: number, to: number }} way @param {number} t */
const shareOf = ({ from, to }, t) => Math.max(0, Math.min(1, (t - from) / (to - from || 1)));

/** The point at a share of a polyline. @param {number[][]} points @param {number} share */
export function pointOn(points, share) {
  const sizes = points.slice(1).map(([x, y], i) => Math.hypot(x - points[i][0], y - points[i][1]));
  let left = share * sizes.reduce((sum, x) => sum + x, 0);
  for (const [i, size] of sizes.entries()) {
    if (left <= size) {
      const part = size ? left / size : 0;
      return [0, 1].map((axis) => points[i][axis] + part * (points[i + 1][axis] - points[i][axis]));
    }
    left -= size;
  }
  return points[points.length - 1];
}

/** @param {CanvasRenderingContext2D} context @param {any} way @param {number} share @param {any} style */
function trace(context, { points }, share, { color, width, light }) {
  const end = pointOn(points, share);
  context.strokeStyle = color;
  context.lineWidth = width;
  context.globalAlpha = light;
  context.beginPath();
  context.moveTo(points[0][0], points[0][1]);
  const way = Math.sign(points[points.length - 1][1] - points[0][1]) || 1;
  for (const [x, y] of points.slice(1)) if (way * (end[1] - y) > 0) context.lineTo(x, y);
  context.lineTo(end[0], end[1]);
  context.stroke();
  context.globalAlpha = 1;
}

/** @param {CanvasRenderingContext2D} context @param {number[]} point @param {any} way @param {any} colors */
function dot(context, [x, y], { width, light, kind }, colors) {
  const radius = 2.5 + width / 2;
  for (const [size, alpha] of [[2.2, 0.25], [1, 1]]) {
    context.globalAlpha = alpha * light;
    context.fillStyle = colors[kind];
    context.beginPath();
    context.arc(x, y, size * radius, 0, 2 * Math.PI);
    context.fill();
  }
  context.globalAlpha = 1;
}

/** @param {CanvasRenderingContext2D} context @param {number} x @param {number} y @param {number} radius @param {number} alpha
 * @param {string} color */
function ring(context, x, y, radius, alpha, color) {
  context.globalAlpha = alpha;
  context.strokeStyle = color;
  context.lineWidth = 3;
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.stroke();
  context.globalAlpha = 1;
}

/** @param {CanvasRenderingContext2D} context @param {import("./play_plan.js").Plan} plan @param {any} colors */
function drawBlocks(context, { rows, block }, colors) {
  context.fillStyle = colors.block;
  context.strokeStyle = colors["block-line"];
  context.lineWidth = 1;
  const boxes = rows.filter((row) => row.kind === "folded").map((row) => [row.y - row.high / 2 + 1, row.y + row.high / 2 - 1]);
  for (const [top, bottom] of [block, ...boxes]) {
    context.beginPath();
    context.roundRect(3.5, Math.round(top) + 0.5, WIDE - 7, Math.round(bottom - top), 6);
    context.fill();
    context.stroke();
  }
}

/** Names, and the lengths as soon as they are known. @param {CanvasRenderingContext2D} context
 * @param {import("./play_plan.js").Plan} plan @param {number} t @param {any} colors */
function drawRows(context, { rows, stops, lengths, heads }, t, colors) {
  context.textBaseline = "middle";
  for (const row of rows) {
    const { id, y, high, label, top, kind } = row;
    const size = Math.max(7, Math.min(12.5, high - 2));
    const fan = isFan(row);
    context.font = `${top || kind === "folded" ? "600 " : ""}${size}px system-ui, sans-serif`;
    context.fillStyle = colors.ink;
    context.textAlign = "left";
    context.fillText(label, 96, fan ? y - 18 : y);
    if (fan && heads <= NUMBERED) for (let i = 0; i < heads; i++) numberAt(context, slotOf(i, heads), y, i + 1, colors);
    for (const stop of stops) {
      if (stop.row !== row) continue;
      const side = stop.kind === "forward" ? "a" : "delta";
      if (!fan) drawJoint(context, joint(stop.kind), y, Math.min(3.5, high / 3), colors.card, colors[`${stop.kind}-line`]);
      const length = top ? null : lengths[side][id];
      if (stop.at > t + 1e-9 || length === null || length === undefined) continue;
      context.font = `${size}px system-ui, sans-serif`;
      context.fillStyle = colors[stop.kind];
      context.textAlign = stop.kind === "forward" ? "left" : "right";
      context.fillText(number(length, 2), stop.kind === "forward" ? 42 : WIDE - 42, fan ? y + 22 : y);
    }
  }
}

/** The number of a head. @param {CanvasRenderingContext2D} context @param {number} x @param {number} y @param {number} head
 * @param {any} colors */
function numberAt(context, x, y, head, colors) {
  drawJoint(context, x, y, 7, colors.card, colors["block-line"]);
  context.fillStyle = colors.ink;
  context.font = "9px system-ui, sans-serif";
  context.textAlign = "center";
  context.fillText(String(head), x, y + 0.5);
}

/** @param {CanvasRenderingContext2D} context @param {number} x @param {number} y @param {number} radius @param {string} fill
 * @param {string} stroke */
function drawJoint(context, x, y, radius, fill, stroke) {
  context.fillStyle = fill;
  context.strokeStyle = stroke;
  context.lineWidth = 1.5;
  context.beginPath();
  context.arc(x, y, radius, 0, 2 * Math.PI);
  context.fill();
  context.stroke();
}

/** The pass above the rows, what the last stop says below them. @param {CanvasRenderingContext2D} context
 * @param {import("./play_plan.js").Plan} plan @param {any} stop @param {any} colors */
function say(context, { rows, high }, { kind, text }, colors) {
  context.font = "600 13px system-ui, sans-serif";
  for (const [one, x, words] of [["forward", 14, "forward ↓  ‖a‖"], ["backward", WIDE - 14, "‖Δ‖  ↑ backward"]]) {
    context.globalAlpha = one === kind ? 1 : 0.4;
    context.fillStyle = colors[one];
    context.textAlign = one === "forward" ? "left" : "right";
    context.fillText(String(words), Number(x), 18);
  }
  context.globalAlpha = 1;
  context.fillStyle = colors.ink;
  context.textAlign = "left";
  context.font = "13px system-ui, sans-serif";
  const bottom = rows[rows.length - 1].y;
  let y = bottom + 34;
  for (const line of wrapped(context, text, WIDE - 28)) {
    if (y > high - 8) break;
    context.fillText(line, 14, y);
    y += 18;
  }
}

/** @param {CanvasRenderingContext2D} context @param {string} text @param {number} width */
function wrapped(context, text, width) {
  const lines = [""];
  for (const word of text.split(" ")) {
    const longer = `${lines[lines.length - 1]} ${word}`.trim();
    if (context.measureText(longer).width <= width) lines[lines.length - 1] = longer;
    else lines.push(word);
  }
  return lines;
}
