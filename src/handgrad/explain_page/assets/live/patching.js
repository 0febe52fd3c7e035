// @ts-check
// A part of this trace gets the values of another one: all patches predicted by ⟨Δ, a′ − a⟩, one measured, as
// views/patching.py with model/inspect/patch.py. Every block of a model that is computed here has all these activations.

import { matrix } from "../engine/matrix.js";
import { quote } from "../format.js";
import { RequestError } from "../request_error.js";
import { absolute, range, rowOf, top } from "./matrices.js";
import { grouped, quoted, signal, symbol, typeset } from "./notation.js";
import { inPython } from "./objectives.js";
import { picture } from "./pictures.js";
import { movesOf } from "./what_if.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Traced} Traced */
/** @typedef {import("../engine/matrix.js").Matrix} Matrix */
/** A row here → the row of the other trace that belongs to it. @typedef {Map<number, number>} Rows */

const KINDS = {
  a_3: "heads",
  a_1: "stream before the block",
  a_5: "stream after attention",
  a_4: "what attention adds",
  a_9: "what the feed-forward layer adds",
};
const LARGEST = 8; // that are listed
const COLUMNS = 4096; // all of them: the picture is as wide as the model is deep

/** Every patch of a kind: of each head or block, at each position. @param {Session} session @param {Traced} sentence
 * @param {{ other: string, of?: string }} given */
export function patchMapAt(session, sentence, { other, of = "a_3" }) {
  const theirs = session.find(other),
    byHead = hasHeads(of),
    { n_blocks: blocks, n_heads: heads } = session.config;
  const rows = partners(sentence, theirs);
  /** @type {[number, number | null][]} */
  const places = range(blocks).flatMap((block) =>
    byHead ? range(heads).map((head) => /** @type {[number, number]} */ ([block, head])) : [[block, null]],
  );
  const values = predictions(session, sentence, theirs, of, places, rows);
  const ranked = top(absolute(values.data), LARGEST).filter((k) => values.data[k]);
  const largest = ranked.map((k) => {
    const [t, column] = [Math.floor(k / values.cols), k % values.cols],
      [block, head] = places[column];
    const label = labelOf(session, sentence, of, block, head, t);
    return { block, head, position: t, predicted: values.data[k], label };
  });
  const axes = byHead ? "('position', 'head')" : "('position',)";
  return {
    of,
    kinds: Object.entries(KINDS).map(([of, label]) => ({ of, label: `${label} ${symbol(of)}` })),
    places,
    values: range(values.rows).map((t) => [...rowOf(values, t)]),
    picture: picture(values, { limit: COLUMNS, rowsLimit: values.rows, fullRange: true }),
    largest,
    caption: about(largest, values, rows),
    python:
      `found = hg.patch_map(model, tokens, targets, other, '${of}', ${axes}` +
      `${objectiveArgument(sentence)}${alignArgument(sentence, theirs)})\n` +
      `found.predicted${byHead ? ".transpose(0, 1).flatten(1)" : ".T"}`,
  };
}

/** Patch one part, at one position or all, and run the model. @param {Session} session @param {Traced} sentence
 * @param {{ other: string, block: number, of?: string, head?: number, position?: number }} given */
export function patchAt(session, sentence, { other, block, of = "a_3", head, position }) {
  const theirs = session.find(other),
    { config } = session;
  const byHead = hasHeads(of);
  checkIndex("block", block, config.n_blocks);
  if (head !== undefined && !byHead) throw new RequestError(`${of} has no heads: leave head out`);
  if (head !== undefined) checkIndex("head", head, config.n_heads);
  if (position !== undefined) checkIndex("position", position, sentence.ids.length);
  const rows = partners(sentence, theirs);
  if (position !== undefined && !rows.has(position))
    throw new RequestError(`position ${position} has no row in the other trace: add it to align`);

  const name = `blocks.${block}.${of}`,
    its = theirs.trace.get(name),
    columns = columnsOf(session, head);
  const replaced = [...rows].filter(([t]) => position === undefined || t === position);
  const edit = (/** @type {Matrix} */ x) => {
    for (const [t, s] of replaced) rowOf(x, t).set(rowOf(its, s).subarray(...columns), columns[0]);
    return x;
  };
  const { version, ids, objective, trace } = sentence;
  const after = session.run(version, ids, { objective, edits: new Map([[name, edit]]), forwardOnly: true });
  const guess = replaced.reduce((all, [t, s]) => all + predicted(sentence, theirs, name, t, s, columns), 0);
  const measured = after.value - trace.value,
    label = labelOf(session, sentence, of, block, head ?? null, position ?? null);
  const where = Object.entries({ position, head }).map(([key, i]) => (i === undefined ? "" : `, ${key}=${i}`));
  return {
    label,
    value: trace.value,
    predicted: guess,
    measured,
    moves: movesOf(session, sentence, after),
    caption:
      `With ${label} from the other trace the objective changes by ${typeset(measured)}; the gradient predicted` +
      ` ${typeset(guess)}. The objective of the other trace is ${typeset(theirs.trace.value)}.`,
    python:
      `patch = hg.patch_from(other, '${name}'${where.join("")}${alignArgument(sentence, theirs)})\n` +
      `base, changed = (hg.trace(model, tokens, targets${objectiveArgument(sentence)}, edit=edit) for edit in ({}, patch))\n` +
      "changed.loss - base.loss, patch.predicted(trace)",
  };
}

/** ⟨Δ, a′ − a⟩ of every position and place (n, places); 0 in rows without a partner. @param {Session} session
 * @param {Traced} one @param {Traced} other @param {string} of @param {[number, number | null][]} places @param {Rows} rows */
function predictions(session, one, other, of, places, rows) {
  const found = matrix(one.ids.length, places.length);
  places.forEach(([block, head], column) => {
    const columns = columnsOf(session, head);
    for (const [t, s] of rows)
      found.data[t * found.cols + column] = predicted(one, other, `blocks.${block}.${of}`, t, s, columns);
  });
  return found;
}

/** Σ Δ ∘ (a′ − a) over these columns of a row. @param {Traced} one @param {Traced} other @param {string} name
 * @param {number} t @param {number} s  the row of the other @param {[number, number | undefined]} columns */
function predicted({ trace }, other, name, t, s, [from, to]) {
  const [own, delta, its] = [[trace.get(name), t], [trace.get(signal(name)), t], [other.trace.get(name), s]].map(
    ([x, row]) => rowOf(/** @type {Matrix} */ (x), /** @type {number} */ (row)),
  );
  let change = 0;
  for (let j = from; j < (to ?? own.length); j++) change += delta[j] * (its[j] - own[j]);
  return change;
}

/** Those of a head in a row of a_3, or all. @param {Session} session @param {number | null} [head]
 * @returns {[number, number | undefined]} */
const columnsOf = ({ config: { d_head: width } }, head) =>
  head === null || head === undefined ? [0, undefined] : [head * width, (head + 1) * width];

/** Whether patches of an activation are told apart by head. @param {string} of */
function hasHeads(of) {
  if (Object.hasOwn(KINDS, of)) return of === "a_3";
  const known = Object.keys(KINDS).join(", ");
  throw new RequestError(`${quoted(of.slice(0, 40))} cannot be patched here: choose one of ${known}`);
}

/** @param {string} what @param {number} i @param {number} end */
function checkIndex(what, i, end) {
  if (!(i >= 0 && i < end)) throw new RequestError(`${what} must be a number from 0 to ${end - 1}, not ${i}`);
}

/** @param {Traced} one @param {Traced} other @returns {Rows} */
const partners = (one, other) =>
  one.ids.length === other.ids.length ? new Map(one.ids.map((_, t) => [t, t])) : align(one.ids, other.ids);

/** Pairs of rows: runs of equal tokens, and between them from the end. The longest run is taken first, of several the one
 * that is first here, then there; what is before and after it is paired likewise.
 * @param {number[]} one @param {number[]} other @returns {Rows} */
export function align(one, other) {
  /** @type {Rows} */
  const found = new Map();
  const pair = (/** @type {number} */ end, /** @type {number} */ itsEnd, /** @type {number} */ count) => {
    for (let i = count; i > 0; i--) found.set(end - i, itsEnd - i);
  };
  /** @param {[number, number]} here @param {[number, number]} there */
  const within = ([first, end], [itsFirst, itsEnd]) => {
    const [t, s, size] = longestRun(one, other, [first, end], [itsFirst, itsEnd]);
    if (!size) return pair(end, itsEnd, Math.min(end - first, itsEnd - itsFirst));
    within([first, t], [itsFirst, s]);
    pair(t + size, s + size, size);
    within([t + size, end], [s + size, itsEnd]);
  };
  within([0, one.length], [0, other.length]);
  return found;
}

/** Where it begins here and there, and how long it is. @param {number[]} one @param {number[]} other
 * @param {[number, number]} here @param {[number, number]} there @returns {[number, number, number]} */
function longestRun(one, other, [first, end], [itsFirst, itsEnd]) {
  let best = /** @type {[number, number, number]} */ ([first, itsFirst, 0]);
  for (let t = first; t < end; t++)
    for (let s = itsFirst; s < itsEnd; s++) {
      let size = 0;
      while (t + size < end && s + size < itsEnd && one[t + size] === other[s + size]) size++;
      if (size > best[2]) best = [t, s, size];
    }
  return best;
}

/** @param {Session} session @param {Traced} sentence @param {string} of @param {number} block @param {number | null} head
 * @param {number | null} position */
function labelOf(session, sentence, of, block, head, position) {
  const part = head === null ? `${symbol(of)} of block ${block + 1}` : `head ${head + 1} of block ${block + 1}`;
  if (position === null) return `${part} at every position`;
  return `${part} at ${quote(session.tokenText(sentence.ids[position]))} (position ${position + 1})`;
}

/** @param {{ label: string, predicted: number }[]} largest @param {Matrix} values @param {Rows} rows */
function about([first], { data, rows: n }, rows) {
  let text =
    `All ${grouped(data.length)} patches are predicted by the one backward pass that this page has made; measuring them` +
    " would take as many forward passes.";
  text += first
    ? ` The largest change is predicted for ${first.label}: ${typeset(first.predicted)}.`
    : " All predicted changes are 0: the objective does not depend on the tokens that differ.";
  if (rows.size < n)
    text += ` ${n - rows.size} of the ${n} tokens have no partner in the other sentence and stay as they are.`;
  return text;
}

/** @param {Traced} sentence */
const objectiveArgument = ({ objective }) => (objective.kind === "sentence" ? "" : `, objective=hg.${inPython(objective)}`);

/** @param {Traced} one @param {Traced} other */
const alignArgument = (one, other) =>
  one.ids.length === other.ids.length ? "" : ", align=hg.align(trace['a_0'], other['a_0'])";
