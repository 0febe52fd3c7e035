// @ts-check
// The geometry of a heat map: which entries a cell shows, where cells and labels are, and which cell is at a point.

import { fit, visible } from "./format.js";

/**
 * @typedef {{ shape: number[], rows: number[], columns: number[], cells: number[], pool: number[], scale: number,
 *   largest: number, q: string }} Picture  see pictures.py
 * @typedef {{ left: number, top: number, cw: number, ch: number, wide: number, high: number, upright: boolean }} Layout
 * @typedef {{ rowLabels?: string[] | null, columnLabels?: string[] | null, square?: boolean }} Labels
 */

const LETTER = 7.3; // width of a letter of a label, in pixels
const ROW_LABEL = 12,
  SQUARE_LABEL = 8,
  COLUMN_LABEL = 7; // most letters

/** The colors of the cells, from −127 to 127. @param {Picture} picture */
export function cellsOf(picture) {
  const bytes = Uint8Array.from(atob(picture.q), (c) => c.charCodeAt(0));
  return new Int8Array(bytes.buffer);
}

/** @param {Int8Array} cells */
function encode(cells) {
  let text = "";
  for (const byte of new Uint8Array(cells.buffer)) text += String.fromCharCode(byte);
  return btoa(text);
}

/** A picture of values that the page itself has computed, in [0, 1] or [−1, 1].
 * @param {number[][]} values
 * @returns {Picture} */
export function pictureOf(values, scale = 1) {
  const shape = [values.length, values[0].length];
  const cells = Int8Array.from(values.flat(), (x) => Math.round(127 * Math.max(-1, Math.min(1, x))));
  return {
    shape,
    rows: [0, shape[0]],
    columns: [0, shape[1]],
    cells: shape,
    pool: [1, 1],
    scale,
    largest: scale,
    q: encode(cells),
  };
}

/** A picture without colors, for a matrix whose entries are not known. @param {number[]} shape */
export function blankPicture([rows, columns]) {
  const pool = [Math.ceil(rows / 64), Math.ceil(columns / 64)];
  const cells = [Math.ceil(rows / pool[0]), Math.ceil(columns / pool[1])];
  const q = encode(new Int8Array(cells[0] * cells[1]));
  return { shape: [rows, columns], rows: [0, rows], columns: [0, columns], cells, pool, scale: 0, largest: 0, q };
}

/** Some columns of a picture, for when the server cannot be asked for them.
 * @param {Picture} picture
 * @param {number[]} columns */
export function crop(picture, columns) {
  const [first, pool] = [picture.columns[0], picture.pool[1]];
  const from = Math.floor((columns[0] - first) / pool),
    to = Math.ceil((columns[1] - first) / pool);
  const [rows, wide] = picture.cells;
  const all = cellsOf(picture),
    part = new Int8Array(rows * (to - from));
  for (let i = 0; i < rows; i++) part.set(all.subarray(i * wide + from, i * wide + to), i * (to - from));
  const shown = [first + from * pool, Math.min(first + to * pool, picture.columns[1])];
  return { ...picture, columns: shown, cells: [rows, to - from], q: encode(part) };
}

/** The entries, first and after the last, that cell i of an axis shows. @param {Picture} picture */
export function range(picture, i, axis) {
  const [from, to] = axis ? picture.columns : picture.rows;
  const pool = picture.pool[axis];
  return [from + i * pool, Math.min(from + (i + 1) * pool, to)];
}

/** The cells of a row and of a column, or the one cell of both: first row, first column, rows, columns; none where nothing is
 * given, and none outside the picture.
 * @param {Picture} picture @param {{ row: number | null, column: number | null }} lit */
export function litCells(picture, { row, column }) {
  const [rows, columns] = picture.cells;
  if (row === null && column === null) return [];
  const cell = (/** @type {number | null} */ entry, /** @type {number} */ axis) =>
    entry === null ? null : Math.floor((entry - (axis ? picture.columns : picture.rows)[0]) / picture.pool[axis]);
  const [i, j] = [cell(row, 0), cell(column, 1)];
  if ((i !== null && (i < 0 || i >= rows)) || (j !== null && (j < 0 || j >= columns))) return [];
  return [[i ?? 0, j ?? 0, i === null ? rows : 1, j === null ? columns : 1]];
}

/** @param {string[]} labels @param {number} most */
const longest = (labels, most) => Math.min(most, Math.max(1, ...labels.map((label) => [...visible(label)].length)));

/** Where the cells are in a frame `width` pixels wide.
 * @param {Picture} picture
 * @param {Labels} labels
 * @returns {Layout} */
export function layout(picture, { rowLabels, columnLabels, square }, width) {
  const [rows, columns] = picture.cells;
  const letters = columnLabels ? longest(columnLabels, COLUMN_LABEL) : 0;
  const plain = picture.shape[0] === 1 ? 4 : 34;
  const left = rowLabels ? 12 + LETTER * longest(rowLabels, square ? SQUARE_LABEL : ROW_LABEL) : plain;
  let cw = Math.max(120, width - left - 2) / columns,
    ch;
  if (square) cw = ch = Math.max(2, Math.min(26, cw, 560 / rows));
  else if (rowLabels) ch = Math.max(rows > 60 ? 7 : 11, Math.min(17, 560 / rows));
  else ch = Math.max(1.5, Math.min(16, 150 / rows));
  const upright = letters <= 2 || LETTER * letters + 4 <= cw; // labels that have room need not be turned
  const top = !letters ? 4 : upright ? 18 : 10 + LETTER * letters;
  return {
    left,
    top,
    cw,
    ch,
    upright,
    wide: Math.round(left + columns * cw + 2),
    high: Math.round(top + rows * ch + 2),
  };
}

/** The cell at a point, or null. @param {Picture} picture @param {Layout} at @returns {[number, number] | null} */
export function cellAt(picture, at, x, y) {
  const i = Math.floor((y - at.top) / at.ch),
    j = Math.floor((x - at.left) / at.cw);
  return i >= 0 && j >= 0 && i < picture.cells[0] && j < picture.cells[1] ? [i, j] : null;
}

/** The labels to write and where: every label that has room.
 * @param {Picture} picture
 * @param {Layout} at
 * @param {Labels} labels */
export function labelsAt(picture, at, { rowLabels, columnLabels, square }) {
  const texts = [];
  const [rows, columns] = picture.cells;
  if (rowLabels) {
    const every = Math.max(1, Math.ceil(10 / at.ch));
    for (let i = 0; i < rows; i += every) {
      const text = fit(visible(rowLabels[range(picture, i, 0)[0]] ?? ""), square ? SQUARE_LABEL : ROW_LABEL);
      texts.push({ text, x: at.left - 6, y: at.top + (i + 0.5) * at.ch, anchor: "end", turned: false, row: i });
    }
  }
  if (columnLabels) {
    const every = Math.max(1, Math.ceil((at.upright ? 16 : 10) / at.cw));
    for (let j = 0; j < columns; j += every) {
      const text = fit(visible(columnLabels[range(picture, j, 1)[0]] ?? ""), COLUMN_LABEL);
      const x = at.left + (j + 0.5) * at.cw;
      texts.push({
        text,
        x,
        y: at.top - (at.upright ? 8 : 4),
        anchor: at.upright ? "middle" : "start",
        turned: !at.upright,
        row: null,
      });
    }
  }
  return texts;
}
