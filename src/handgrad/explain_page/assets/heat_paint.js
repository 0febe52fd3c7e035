// @ts-check
// Drawing a heat map: on a canvas for the page, and as SVG for a file.

import { color, css, palette } from "./colors.js";
import { escape } from "./element_svg.js";
import { cellsOf, labelsAt } from "./heat_geometry.js";

/** @typedef {import("./heat_geometry.js").Picture} Picture */
/** @typedef {import("./heat_geometry.js").Layout} Layout */

/** The cells, one pixel each. @param {Picture} picture @param {import("./colors.js").Kind} kind */
export function pixelsOf(picture, kind) {
  const [rows, columns] = picture.cells;
  const image = new ImageData(columns, rows);
  const pixels = new Uint32Array(image.data.buffer),
    colors = palette(kind);
  cellsOf(picture).forEach((x, i) => (pixels[i] = colors[x & 255]));
  const canvas = document.createElement("canvas");
  Object.assign(canvas, { width: columns, height: rows });
  canvas.getContext("2d")?.putImageData(image, 0, 0);
  return canvas;
}

/** The rows that are marked, as rectangles: the selected row, the cell under the cursor, the columns being dragged over.
 * @param {Picture} picture
 * @param {Layout} at
 * @param {{ selected: number, cursor: number[] | null, drag: number[] | null, lit: { rows: number[][], columns: number[][] } }} marks */
function marksAt(picture, at, { selected, cursor, drag, lit }) {
  const [rows, columns] = picture.cells;
  const found = [];
  for (const [from, to] of lit.rows)
    found.push({ x: at.left - 1, y: at.top + from * at.ch - 1, w: columns * at.cw + 2, h: (to - from) * at.ch + 2, thick: 2, lit: true });
  for (const [from, to] of lit.columns)
    found.push({ x: at.left + from * at.cw - 1, y: at.top - 1, w: (to - from) * at.cw + 2, h: rows * at.ch + 2, thick: 2, lit: true });
  if (selected >= 0 && selected < rows)
    found.push({
      x: at.left - 0.5,
      y: at.top + selected * at.ch - 0.5,
      w: columns * at.cw + 1,
      h: at.ch + 1,
      thick: 1,
    });
  if (cursor) {
    const [x, y] = [at.left + cursor[1] * at.cw - 1, at.top + cursor[0] * at.ch - 1];
    found.push({ x, y, w: Math.max(4, at.cw + 2), h: Math.max(4, at.ch + 2), thick: 2 });
  }
  if (drag && drag[1] !== drag[0]) {
    const [from, to] = [Math.min(...drag), Math.max(...drag) + 1];
    found.push({ x: at.left + from * at.cw, y: at.top - 1, w: (to - from) * at.cw, h: rows * at.ch + 2, thick: 2 });
  }
  return found;
}

/** @param {HTMLCanvasElement} canvas
 * @param {HTMLCanvasElement} pixels
 * @param {Picture} picture
 * @param {Layout} at
 * @param {any} labels
 * @param {any} marks */
export function paintCanvas(canvas, pixels, picture, at, labels, marks, ratio = window.devicePixelRatio || 1) {
  const [rows, columns] = picture.cells;
  Object.assign(canvas, { width: at.wide * ratio, height: at.high * ratio });
  const context = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const style = getComputedStyle(document.documentElement);
  const [ink, soft, line, focus] = ["--ink", "--soft", "--line", "--focus"].map((name) => style.getPropertyValue(name));
  context.scale(ratio, ratio);
  context.imageSmoothingEnabled = false;
  context.drawImage(pixels, at.left, at.top, columns * at.cw, rows * at.ch);
  if (marks.lit?.length) lightUp(context, pixels, at, marks.lit, [rows, columns]);
  context.font = labelFont(at);
  context.textBaseline = "middle";
  for (const { text, x, y, anchor, turned, row } of labelsAt(picture, at, labels)) {
    context.save();
    context.fillStyle = row !== null && row === marks.selected ? ink : soft;
    context.textAlign = anchor === "end" ? "right" : anchor === "middle" ? "center" : "left";
    context.translate(x, y);
    if (turned) context.rotate(-Math.PI / 2);
    context.fillText(text, 0, 0);
    context.restore();
  }
  context.strokeStyle = line;
  context.strokeRect(at.left - 0.5, at.top - 0.5, columns * at.cw + 1, rows * at.ch + 1);
  for (const { x, y, w, h, thick, lit } of marksAt(picture, at, marks)) {
    context.strokeStyle = lit ? focus : ink;
    context.lineWidth = thick;
    context.strokeRect(x, y, w, h);
  }
}

/** Some cells, by first row, first column, rows and columns, as they are, with a frame; all others paler.
 * @param {CanvasRenderingContext2D} context @param {HTMLCanvasElement} pixels @param {Layout} at @param {number[][]} lit
 * @param {number[]} cells */
function lightUp(context, pixels, at, lit, [rows, columns]) {
  const style = getComputedStyle(document.documentElement);
  context.save();
  context.globalAlpha = 0.65;
  context.fillStyle = style.getPropertyValue("--card");
  context.fillRect(at.left, at.top, columns * at.cw, rows * at.ch);
  context.globalAlpha = 1;
  context.strokeStyle = style.getPropertyValue("--focus");
  context.lineWidth = 2;
  for (const [i, j, down, right] of lit) {
    const box = [at.left + j * at.cw, at.top + i * at.ch, right * at.cw, down * at.ch];
    context.drawImage(pixels, j, i, right, down, box[0], box[1], box[2], box[3]);
    context.strokeRect(box[0] - 1, box[1] - 1, Math.max(4, box[2] + 2), Math.max(4, box[3] + 2));
  }
  context.restore();
}

/** @param {Layout} at */
const labelFont = (at) => `${Math.min(12, Math.max(9, at.ch - 1))}px ui-monospace, monospace`;

/** The picture as an SVG file: labels as text, cells as an image that is not smoothed.
 * @param {HTMLCanvasElement} pixels @param {Picture} picture @param {Layout} at @param {any} labels */
export function svgText(pixels, picture, at, labels) {
  const [rows, columns] = picture.cells;
  const texts = labelsAt(picture, at, labels).map(({ text, x, y, anchor, turned }) => {
    const turn = turned ? ` transform="rotate(-90 ${x} ${y})"` : "";
    return `<text x="${x}" y="${y}" text-anchor="${anchor}" dominant-baseline="middle"${turn}>${escape(text)}</text>`;
  });
  const box = `x="${at.left}" y="${at.top}" width="${columns * at.cw}" height="${rows * at.ch}"`;
  return [
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${at.wide} ${at.high}" width="${at.wide}" ` +
      `height="${at.high}">`,
    `<style>text { font: ${labelFont(at)}; fill: #555; }</style>`,
    `<image ${box} preserveAspectRatio="none" style="image-rendering: pixelated" href="${pixels.toDataURL()}"/>`,
    ...texts,
    `<rect ${box} fill="none" stroke="#bbb"/>`,
    "</svg>",
  ].join("\n");
}

/** The color scale, from −1 or from 0 to 1.
 * @param {HTMLCanvasElement} bar
 * @param {import("./colors.js").Kind} kind
 * @param {boolean} positive */
export function paintScale(bar, kind, positive) {
  const context = bar.getContext("2d");
  for (let x = 0; context && x < bar.width; x++) {
    const share = x / (bar.width - 1);
    context.fillStyle = css(color(kind, positive ? share : 2 * share - 1));
    context.fillRect(x, 0, 1, bar.height);
  }
}
