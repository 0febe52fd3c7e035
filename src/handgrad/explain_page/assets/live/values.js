// @ts-check
// Single values and parts of the tensors of a trace, as views/values.py.

import { RequestError } from "../request_error.js";
import { headOf } from "./attention.js";
import { columnsOf, furthest, rowOf, rowsOf } from "./matrices.js";
import { blockOf } from "./network.js";
import { grouped, split } from "./notation.js";
import { picture } from "./pictures.js";
import { estimates, relaxedSignal } from "./swaps.js";
import { Tensors } from "./tensors.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Traced} Traced */

const MAX_ENTRIES = 2_000_000; // of a matrix as a file

/** A tensor of the trace as a matrix; `head` selects one of a tensor with heads. @param {Session} session
 * @param {Traced} sentence @param {{ name: string, head?: number }} which */
function matrixOf(session, sentence, { name, head }) {
  if (name === "delta_0") return relaxedSignal(session, sentence);
  if (name === "swaps") return estimates(session, sentence);
  const { trace } = sentence,
    [here, last] = split(name);
  const sent = last === "sent" && trace.has(`${here}rho`), // not recorded: computed from what is
    tensors = new Tensors(session, sentence),
    heads = tensors.heads(sent ? `${here}rho` : name);
  if (heads && !(head !== undefined && head >= 0 && head < heads))
    throw new RequestError(`${name} has ${heads} heads: pass head=0 to ${heads - 1}`);
  if (sent) return headOf(session, sentence, blockOf(name) ?? 0, head ?? 0).sent;
  return tensors.get(name, heads ? head : null);
}

/** @param {any} x @param {string} name */
const shape = (x, name) => `${name} is ${x.rows} × ${x.cols}`;

/** A part of a matrix as a picture, for zooming, or all of it. @param {Session} session @param {Traced} sentence
 * @param {{ name: string, head?: number, rows?: number[], columns?: number[] }} given */
export function sliceOf(session, sentence, given) {
  const { rows: someRows, columns: someColumns, ...which } = given,
    x = matrixOf(session, sentence, which);
  const [rows, columns] = [someRows ?? [0, x.rows], someColumns ?? [0, x.cols]];
  for (const [[low, high], size] of /** @type {[number[], number][]} */ ([[rows, x.rows], [columns, x.cols]]))
    if (!(0 <= low && low < high && high <= size))
      throw new RequestError(`${shape(x, which.name)}; the range ${low}:${high} is outside it`);
  return picture(x, { rows, columns });
}

/** The exact value that a cell shows: of its entries the one furthest from 0. @param {Session} session
 * @param {Traced} sentence @param {{ name: string, head?: number, rows: number[], columns: number[] }} given */
export function valueAt(session, sentence, { rows, columns, ...which }) {
  const x = matrixOf(session, sentence, which);
  const part = rowsOf(x, between(rows, x.rows)),
    chosen = columnsOf(part, between(columns, x.cols));
  if (!chosen.data.length)
    throw new RequestError(`${shape(x, which.name)}; rows ${rows.join(":")}, columns ${columns.join(":")} are outside it`);
  const k = furthest(chosen.data),
    i = Math.floor(k / chosen.cols);
  return { value: chosen.data[k], row: rows[0] + i, column: columns[0] + (k % chosen.cols) };
}

/** @param {number[]} range @param {number} size */
const between = ([low, high], size) =>
  Array.from({ length: Math.max(0, Math.min(high, size) - Math.max(low, 0)) }, (_, i) => Math.max(low, 0) + i);

/** The entries of a matrix, for a file: all, or those of some rows and columns. @param {Session} session
 * @param {Traced} sentence @param {{ name: string, head?: number, rows?: number[], columns?: number[] }} given */
export function entriesOf(session, sentence, { rows, columns, ...which }) {
  let x = matrixOf(session, sentence, which);
  for (const [ids, size] of /** @type {[number[] | undefined, number][]} */ ([[rows, x.rows], [columns, x.cols]]))
    if (ids && !ids.every((i) => i >= 0 && i < size))
      throw new RequestError(`${shape(x, which.name)}: there is no such row or column`);
  if (rows) x = rowsOf(x, rows);
  if (columns) x = columnsOf(x, columns);
  if (x.data.length > MAX_ENTRIES)
    throw new RequestError(
      `${which.name} has ${grouped(x.data.length)} entries; a file has at most ${grouped(MAX_ENTRIES)}: read it from Python` +
        " (copy as Python)",
    );
  return { values: Array.from({ length: x.rows }, (_, i) => [...rowOf(x, i)]) };
}
