// @ts-check
// Two traced sentences at every station, or the matrices of one station of both, as views/compare.py.

import { matrix } from "../engine/matrix.js";
import { quote } from "../format.js";
import { argmax, columnsOf, norm, range, rowNorms } from "./matrices.js";
import { isOverVocabulary } from "./network.js";
import { percent, symbol, typeset } from "./notation.js";
import { picture, statistics } from "./pictures.js";
import { vocabulary, vocabularyColumns } from "./station.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Traced} Traced */
/** @typedef {import("../engine/matrix.js").Matrix} Matrix */

/** @param {Session} session @param {Traced} one @param {{ other: string, station?: string }} given */
export function compareAt(session, one, { other, station }) {
  const theirs = session.find(other);
  return station === undefined ? compare(session, one, theirs) : compareStation(session, one, theirs, session.station(station));
}

/** How far apart two traces are at every station, in a and in Δ: ‖x − y‖ / ‖x‖ over the tokens they share.
 * @param {Session} session @param {Traced} one @param {Traced} other */
function compare(session, one, other) {
  const n = shared(one, other);
  const apart = (/** @type {string[]} */ names) =>
    Math.max(0, ...names.filter((name) => !one.trace.heads(name)).map((name) => relative(...both(one, other, name, n))));
  const stations = session.stations
    .filter((s) => s.a.length)
    .map((s) => ({ station: s.id, a: apart(s.a), delta: apart(s.incoming.length ? s.incoming : s.outgoing) }));
  const furthest = stations[argmax(stations.map((row) => row.a))];
  const { title, block } = session.table.stations.find((/** @type {any} */ s) => s.id === furthest.station);
  let text = `The objective is ${typeset(one.trace.value)} here and ${typeset(other.trace.value)} there.`;
  const differs = range(n).find((t) => one.ids[t] !== other.ids[t]) ?? n;
  if (String(one.ids) !== String(other.ids) && differs)
    text +=
      ` The first ${differs} tokens are equal` +
      (session.config.causal && one.version === other.version ? ", and so are their activations, up to rounding." : ".");
  text += furthest.a
    ? ` The activations differ most at “${title}${block === null ? "" : ` of block ${block + 1}`}”: by` +
      ` ${percent(furthest.a)} of their length.`
    : " All activations of the tokens that they share are equal.";
  return { one: side(session, one), other: side(session, other), rows: n, stations, caption: text };
}

/** The matrices of a station of both traces, on one scale, and their difference, other minus one.
 * @param {Session} session @param {Traced} one @param {Traced} other @param {import("./network.js").Station} station */
function compareStation(session, one, other, station) {
  const n = shared(one, other);
  const kinds = [["a", station.a], ["delta", station.incoming.length ? station.incoming : station.outgoing]];
  const maps = kinds.flatMap(([kind, names]) =>
    [...names].filter((name) => !one.trace.heads(name)).map((name) => ({ kind, ...compared(session, one, other, station, name, n) })),
  );
  return { station: station.id, rows: n, one: side(session, one), other: side(session, other), maps };
}

/** @param {Session} session @param {Traced} one @param {Traced} other @param {import("./network.js").Station} station
 * @param {string} name @param {number} n */
function compared(session, one, other, station, name, n) {
  const [x, y] = both(one, other, name, n);
  const difference = matrix(n, x.cols, y.data.map((value, k) => value - x.data[k]));
  const columns = isOverVocabulary(station) ? vocabularyColumns(one, difference) : null;
  const drawn = (/** @type {Matrix} */ side) => (columns ? columnsOf(side, columns) : side);
  const [mine, theirs] = [one, other].map(({ trace }) => drawn(trace.get(name)));
  const scale = Math.max(picture(mine).scale, picture(theirs).scale);
  const part = columns ? `[:, [${columns.join(", ")}]]` : "";
  return {
    name,
    symbol: symbol(name),
    one: picture(mine, { scale }),
    other: picture(theirs, { scale }),
    difference: picture(drawn(difference)),
    vocabulary: columns ? vocabulary(session, columns) : null,
    width: x.cols,
    lengths: rowNorms(difference),
    statistics: statistics(difference),
    relative: relative(x, y),
    caption: about(session, one, x, difference),
    python: `(other['${name}'][:${n}] - trace['${name}'][:${n}])${part}`,
    python_one: `trace['${name}']${part}`,
    python_other: `other['${name}']${part}`,
  };
}

/** @param {Traced} one @param {Traced} other */
const shared = (one, other) => Math.min(one.ids.length, other.ids.length);

/** The first n rows of a tensor of both. @param {Traced} one @param {Traced} other @param {string} name @param {number} n
 * @returns {[Matrix, Matrix]} */
function both(one, other, name, n) {
  const first = (/** @type {Matrix} */ x) => matrix(n, x.cols, x.data.slice(0, n * x.cols));
  return [first(one.trace.get(name)), first(other.trace.get(name))];
}

/** @param {Session} session @param {Traced} sentence */
const side = (session, sentence) => ({
  id: sentence.id,
  text: sentence.text,
  version: sentence.version,
  loss: sentence.trace.value,
  steps: session.version(sentence.version).steps,
  tokens: session.labels(sentence),
});

/** @param {Matrix} x @param {Matrix} y */
function relative(x, y) {
  const size = norm(x.data),
    change = norm(x.data.map((value, k) => y.data[k] - value));
  return size ? change / size : change ? Infinity : 0;
}

/** @param {Session} session @param {Traced} one @param {Matrix} x @param {Matrix} difference */
function about(session, one, x, difference) {
  const lengths = rowNorms(difference),
    t = argmax(lengths),
    whole = rowNorms(x)[t];
  if (!lengths[t]) return "Equal.";
  const share = whole ? `${percent(lengths[t] / whole)} of the row` : "where the row is 0 here";
  return (
    `The largest difference is at ${quote(session.tokenText(one.ids[t]))} (position ${t + 1}): length` +
    ` ${typeset(lengths[t])}, ${share}.`
  );
}
