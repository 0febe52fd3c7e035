// @ts-check
// A head, a skip connection, a neuron or one attention weight is set to 0, or the error on its way back is, as
// views/what_if.py. The model runs twice by the same path, so that what the change does not reach is equal bit for bit.

import { columns, product, t as turned, times } from "../engine/matrix.js";
import { quote } from "../format.js";
import { RequestError } from "../request_error.js";
import { chance, logChances } from "./chances.js";
import { absolute, argmax, norm, range, rowOf, sum, top } from "./matrices.js";
import { letterOf, percent, signal, symbol, typeset } from "./notation.js";
import { inPython } from "./objectives.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Traced} Traced */
/** @typedef {import("../engine/matrix.js").Matrix} Matrix */

const KINDS = ["head", "skip", "neuron", "weight"];
const PAST = ["attention", "feed-forward layer"]; // what the two skip connections of a block pass by
const GRADIENTS_MOVED = "{x: (changed[x] - base[x]).norm() for x in base if 'grad_' in x}";

/**
 * @typedef {object} Place  what is set to 0: entries of a tensor of the trace, and of the error signal
 * @property {string} name  of the activation, as edits call it
 * @property {string} delta  of the error signal, as edits call it
 * @property {(row: number, column: number, head?: number) => boolean} includes
 * @property {string} index  in Python
 * @property {string} label
 * @property {string} a  the activation and its error signal in a trace without edits
 * @property {string} signal
 * @property {number} [head]  of the attention weight
 * @property {string} [cut]  where the error is set to 0, if this is one of several ways that it takes
 */

/** @param {Session} session @param {Traced} sentence @param {any} given @returns {Place} */
function placeOf(session, sentence, { kind, block, edge, ...where }) {
  const { config, network } = session;
  const number = (/** @type {string} */ name, /** @type {number} */ end) => {
    if (!(where[name] >= 0 && where[name] < end))
      throw new RequestError(`${kind}: ${name} must be between 0 and ${end - 1}, not ${where[name] ?? "None"}`);
    return where[name];
  };
  if (!KINDS.includes(kind)) throw new RequestError(`unknown change '${kind}': choose one of ${KINDS.join(", ")}`);
  if (!(block >= 0 && block < config.n_blocks))
    throw new RequestError(`there is no block ${block}: blocks go from 0 to ${config.n_blocks - 1}`);
  const here = `blocks.${block}.`,
    inBlock = `of block ${block + 1}`;
  if (kind === "skip") {
    const steps = network.additions(block),
      i = steps.findIndex((step) => letterOf(step.outputs[0]) === String(edge));
    const choices = steps.map((step, k) => `${letterOf(step.outputs[0])} (past the ${PAST[k]})`);
    if (i < 0) throw new RequestError(`skip: edge must be ${choices.join(" or ")}`);
    const label = `the skip connection past the ${PAST[i]} ${inBlock}`;
    return {
      name: `${here}skip_${edge}`, delta: `${here}delta_skip_${edge}`, includes: () => true, index: "...", label,
      a: steps[i].inputs[0], signal: signal(steps[i].outputs[0]),
    };
  }
  const a = network.find(block, kind === "neuron" ? "activation" : "attention").outputs[0],
    both = { name: a, delta: signal(a), a, signal: signal(a) };
  if (kind === "neuron") {
    const j = number("neuron", config.d_hidden);
    return { ...both, includes: (_, column) => column === j, index: `:, ${j}`, label: `neuron ${j} ${inBlock}` };
  }
  const h = number("head", config.n_heads),
    width = config.d_head;
  if (kind === "head") {
    const [from, to] = [h * width, (h + 1) * width];
    const includes = (/** @type {number} */ _, /** @type {number} */ column) => column >= from && column < to;
    return { ...both, includes, index: `:, ${from}:${to}`, label: `head ${h + 1} ${inBlock}` };
  }
  const [t, s] = ["row", "column"].map((name) => number(name, sentence.ids.length));
  const [to, of] = [s, t].map((i) => quote(session.tokenText(sentence.ids[i])));
  const label = `the attention of ${of} to ${to} in head ${h + 1} ${inBlock}`;
  return {
    name: `${here}rho`, delta: `${here}delta_raw`, a: `${here}rho`, signal: signal(a), head: h, label,
    includes: (row, column, head) => head === h && row === t && column === s, index: `${h}, ${t}, ${s}`,
    cut: `the score of ${label} (through the value it still flows)`,
  };
}

/** @param {Place} place @returns {(x: Matrix, head?: number) => Matrix} */
const zeroed = (place) => (x, head) => {
  for (let i = 0; i < x.rows; i++)
    for (let j = 0; j < x.cols; j++) if (place.includes(i, j, head)) x.data[i * x.cols + j] = 0;
  return x;
};

/** Lines of Python that make the same change. @param {Place} place @param {string} name
 * @param {import("./objectives.js").Objective} objective @param {string} compared */
function python(place, name, objective, compared) {
  const what = objective.kind === "sentence" ? "" : `objective=hg.${inPython(objective)}, `;
  const run = `hg.trace(model, tokens, targets, ${what}edit=`;
  return (
    `def zero(x):\n    x[${place.index}] = 0\n    return x\n` +
    `\nbase = ${run}{})\nchanged = ${run}{'${name}': zero})\n${compared}`
  );
}

/** −⟨Δ, a⟩: the change of the objective to first order if these entries become 0. @param {Session} session
 * @param {Traced} sentence @param {Place} place */
function predicted({ config }, { trace }, place) {
  const x = trace.get(place.a, place.head);
  let delta = trace.get(place.signal);
  if (place.head !== undefined) {
    const [width, h] = [config.d_head, place.head];
    delta = product(columns(delta, h * width, (h + 1) * width), turned(trace.get(place.a.replace("rho", "v"), h))); // Δ_ρ = Δ_3 vᵗ
  }
  let change = 0;
  for (let i = 0; i < x.rows; i++)
    for (let j = 0; j < x.cols; j++)
      if (place.includes(i, j, place.head)) change -= x.data[i * x.cols + j] * delta.data[i * x.cols + j];
  return change;
}

/** @param {Session} session @param {Traced} sentence @param {any} given */
export function whatIfAt(session, sentence, { error = false, ...given }) {
  return (error ? whatIfError : whatIf)(session, sentence, placeOf(session, sentence, given));
}

/** @param {Session} session @param {Traced} sentence @param {Place} place */
function whatIf(session, sentence, place) {
  const { ids, version, objective } = sentence,
    edits = new Map([[place.name, zeroed(place)]]);
  const after = session.run(version, ids, { objective, edits, forwardOnly: true }),
    { value } = sentence.trace;
  const [guess, change] = [predicted(session, sentence, place), after.value - value];
  return {
    label: place.label,
    name: place.name,
    value,
    predicted: guess,
    measured: change,
    moves: movesOf(session, sentence, after),
    caption: about(place, guess, change),
    python: python(place, place.name, objective, "changed.loss - base.loss"),
  };
}

/** What an edit does to the prediction at every position. @param {Session} session @param {Traced} sentence
 * @param {import("../engine/trace.js").Trace} after */
export function movesOf(session, { ids, targets, trace }, after) {
  return targets.map((target, t) => {
    const rows = [trace, after].map((one) => rowOf(one.get("a_12"), t));
    const [was, now] = rows.map((row) => (target < 0 ? null : chance(logChances(row)[target])));
    const [first, second] = rows.map((row) => session.tokenText(argmax(row)));
    const word = target < 0 ? null : session.tokenText(target);
    return { token: session.tokenText(ids[t]), target: word, before: was, after: now, first_before: first, first_after: second };
  });
}

/** @param {Place} place @param {number} guess @param {number} change */
function about({ label }, guess, change) {
  if (change === 0)
    return `Without ${label} the objective is the same; the gradient predicted a change of ${typeset(guess)}.`;
  const text = `Without ${label} the objective changes by ${typeset(change)}; the gradient predicted ${typeset(guess)}.`;
  const wrong = guess * change < 0 || Math.abs(change - guess) > Math.max(Math.abs(change), Math.abs(guess)) / 2;
  return wrong ? `${text} Removing it is too large a step for a first-order prediction.` : text;
}

/** The error signal of a place is set to 0: which signals and gradients change, and by how much. @param {Session} session
 * @param {Traced} sentence @param {Place} place */
function whatIfError(session, sentence, place) {
  const { ids, version, objective, trace: before } = sentence;
  const after = session.run(version, ids, { objective, edits: new Map([[place.delta, zeroed(place)]]) });
  const moved = (/** @type {string} */ name) => {
    const [x, y] = [before, after].map((trace) => trace.get(name).data);
    return { before: norm(x), after: norm(y), change: norm(y.map((value, k) => value - x[k])) };
  };
  const signals = session.stations.flatMap((station) =>
    station.incoming.map((name) => {
      const { before, change } = moved(name);
      return { station: station.id, symbol: symbol(name), before, change };
    }),
  );
  const rows = session.stations.flatMap((station) =>
    station.parameters
      .filter((parameter) => !parameter.shared)
      .map(({ symbol, gradient }) => ({
        station: station.id, block: station.block, symbol, name: gradient, ...moved(gradient),
      })),
  );
  const shareOf = (/** @type {any} */ row) => (row.before ? row.change / row.before : row.change ? Infinity : 0);
  const touched = rows.filter((row) => row.change).sort((x, y) => (shareOf(x) === shareOf(y) ? 0 : shareOf(y) - shareOf(x)));
  const path = place.cut ?? place.label;
  let caption = `${touched.length} of ${rows.length} gradients change if no error flows back through ${path}.`;
  if (touched.length) {
    const [first] = touched;
    const where = first.block === null ? "" : ` of block ${first.block + 1}`;
    const by = first.before ? `by ${percent(shareOf(first))}` : `from 0 to ${typeset(first.after)}`;
    caption += ` The most, relative to its length: ∂${first.symbol}${where}, ${by}.`;
    caption += touched.length < rows.length ? " The others are equal bit for bit." : "";
  }
  return {
    label: path,
    name: place.delta,
    gradients: touched,
    count: rows.length,
    signals,
    caption,
    python: python(place, place.delta, objective, GRADIENTS_MOVED),
  };
}

const NEURONS = 5;

/** The predicted change for every head and skip connection, and for the neurons of each block with the largest.
 * @param {Session} session @param {Traced} sentence */
export function effects(session, { trace }) {
  const { n_blocks: blocks, n_heads: heads, d_head: width } = session.config,
    { network } = session;
  const byColumn = (/** @type {[string, string]} */ [a, delta]) => {
    const parts = times(trace.get(a), trace.get(delta)),
      found = new Float64Array(parts.cols);
    for (let i = 0; i < parts.rows; i++) rowOf(parts, i).forEach((x, j) => (found[j] -= x));
    return found;
  };
  const product = (/** @type {string[]} */ names) => `-(${names.map((name) => `trace[f'blocks.{b}.${name}']`).join(" * ")})`;
  const change = range(blocks).map((b) => {
    const here = `blocks.${b}.`,
      mixed = byColumn([`${here}a_3`, `${here}delta_3`]),
      blame = byColumn([`${here}a_8`, `${here}delta_8`]);
    return {
      heads: range(heads).map((h) => sum(mixed.subarray(h * width, (h + 1) * width))),
      skips: network.additions(b).map((step) => sum(byColumn([step.inputs[0], signal(step.outputs[0])]))),
      neurons: top(absolute(blame), NEURONS).map((neuron) => ({ neuron, predicted: blame[neuron] })),
    };
  });
  const every = `for b in range(${blocks})`;
  const skips = network.additions(0).map((step) => [letterOf(step.inputs[0]), letterOf(step.outputs[0])]);
  return {
    heads: change.map((x) => x.heads),
    skips: change.map((x) => x.skips),
    neurons: change.map((x) => x.neurons),
    edges: skips.map(([, edge], i) => ({ edge, past: PAST[i] })),
    python: {
      heads: `{b: ${product(["a_3", "delta_3"])}.sum(0).view(${heads}, -1).sum(1) ${every}}`,
      skips: `{b: [${skips.map(([a, delta]) => `${product([`a_${a}`, `delta_${delta}`])}.sum()`).join(", ")}] ${every}}`,
      neurons: `{b: ${product(["a_8", "delta_8"])}.sum(0) ${every}}`,
    },
  };
}
