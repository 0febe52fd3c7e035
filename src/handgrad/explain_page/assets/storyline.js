// @ts-check
// The story of one word, continued by every view: one sentence from the view's own data, and where the story goes next.

import { chance, count, number, percent, quote } from "./format.js";

/** A word in a sentence: ‘Berlin’, without the space before it; a space is called so. */
export const said = quote;

/**
 * @typedef {object} Word  the word of the story
 * @property {number} position  of the token before it
 * @property {string} before    that token
 * @property {string} word      the token that came
 * @property {number} loss
 * @property {string} share     its probability, written
 */

/** @param {any} overview @param {number} position @returns {Word} */
export function wordAt({ losses, tokens }, position) {
  const loss = losses[position];
  return { position, before: tokens[position].label, word: tokens[position + 1].label, loss, share: percent(chance(loss)) };
}

/** The word that is explained; if the whole sentence is, the one after the chosen token. @param {any} state */
export const wordOf = ({ overview, token }) =>
  wordAt(overview, overview.objective.position ?? Math.min(token, overview.losses.length - 1));

/** What flows back, in words. @param {any} objective @param {string} word */
function signalOf(objective, word) {
  const { kind, token, against } = objective;
  if (kind === "difference") return `the signal that tells ${said(token.word)} from ${said(against.word)}`;
  return kind === "position" ? `the error of ${said(word)}` : "the error of the whole sentence";
}

/** What is explained, as a quantity that changes. @param {any} objective @param {string} word */
function quantityOf(objective, word) {
  const { kind, token, against } = objective;
  if (kind === "difference") return `the lead of ${said(token.word)} over ${said(against.word)}`;
  return kind === "position" ? `the loss of ${said(word)}` : "the mean loss of the sentence";
}

const capital = (/** @type {string} */ text) => text[0].toUpperCase() + text.slice(1);

/** The index of the largest entry. @param {number[]} values */
const largest = (values) => values.reduce((best, x, i) => (x > values[best] ? i : best), 0);

/** The model's first choice that is not the word that came. @param {any} row  a position of the loss */
const rivalOf = (row) => row.top.find((/** @type {any} */ x) => x.id !== row.target_id);

/** The two words of the question “why this word and not that one?”: the first is the one that the model prefers.
 * @param {any} row  a position of the loss @returns {[any, any] | null} */
export function questionOf(row) {
  const came = { id: row.target_id, word: row.target },
    rival = rivalOf(row);
  if (!rival) return null;
  return row.rank === 1 ? [came, rival] : [rival, came];
}

/** @param {any} state @param {any} data */
function start({ token, overview }, { view }) {
  const row = view.positions[Math.min(token, overview.losses.length - 1)];
  const rival = rivalOf(row);
  if (!rival) return null;
  const other = `${said(rival.word)}, with ${percent(rival.p)}`;
  if (row.rank === 1) {
    const shared = row.ties ? `, together with ${count(row.ties, "other")}` : "";
    return `That was its first choice${shared}. Its next one was ${other}.`;
  }
  return `It expected ${other}: ${number(rival.p / row.probability)} times as probable.`;
}

/** @param {any} state @param {any} data */
function station(state, { view }) {
  const { overview, direction, station: id } = state;
  const { objective, losses, tokens } = overview;
  const { position, before, word, share } = wordOf(state);
  if (id === "loss") return atLoss(objective, wordOf(state), losses, view.positions[position]);
  if (id === "a_0")
    return `${said(word)} was predicted from the ${count(position + 1, "token")} up to ${said(before)}, with ${share}.`;
  const { a, delta } = overview.flows.find((/** @type {any} */ flow) => flow.id === id);
  if (direction === "forward" || !delta) {
    if (!a) return null;
    const mean = a.reduce((/** @type {number} */ sum, /** @type {number} */ x) => sum + x, 0) / a.length;
    return (
      `${said(word)} is predicted from the row of ${said(before)}. Here this row has length ${number(a[position])}; the mean ` +
      `of all ${count(a.length, "row")} is ${number(mean)}.`
    );
  }
  const signal = signalOf(objective, word),
    squares = delta.map((/** @type {number} */ x) => x * x),
    total = squares.reduce((/** @type {number} */ sum, /** @type {number} */ x) => sum + x, 0);
  if (!total) return `Nothing of ${signal} arrives here.`;
  const most = largest(squares),
    here = percent(squares[position] / total);
  const where = `${here} is at ${said(before)}, from which ${said(word)} is predicted.`;
  if (most === position) return `Of ${signal} that arrives here, ${where}`;
  const place = `${percent(squares[most] / total)}, is at ${said(tokens[most].label)} (position ${most + 1})`;
  return `Of ${signal} that arrives here, most, ${place}; ${where}`;
}

/** @param {any} objective @param {Word} about @param {number[]} losses @param {any} row */
function atLoss(objective, { word, loss, share }, losses, row) {
  const sum = losses.reduce((total, x) => total + x, 0);
  const times = number((loss * losses.length) / sum || 0);
  if (objective.kind === "position")
    return `The loss of ${said(word)} is −log p = ${number(loss)}: ${times} times the mean of the sentence.`;
  if (objective.kind === "sentence")
    return `${said(word)} had ${share}: its loss of ${number(loss)} is ${percent(loss / sum || 0)} of the sum over the sentence.`;
  const { token, against, value } = objective;
  const p = (/** @type {any} */ one) =>
    one.id === row.target_id ? row.probability : row.top.find((/** @type {any} */ x) => x.id === one.id)?.p;
  const chances = [token, against].map((one) => `${said(one.word)}${p(one) === undefined ? "" : ` has ${percent(p(one))}`}`);
  const lead = value < 0 ? `${number(-value)} below` : `${number(value)} above`;
  return `${chances.join(", ")}: the logit of the first is ${lead} that of the second, and this difference is explained now.`;
}

/** @param {any} state @param {any} data */
function attribution(state, { found }) {
  const { word, against, value, rows } = found;
  const changes = rows.map((/** @type {any} */ row) => Math.abs(row.removed ?? 0));
  const most = largest(changes);
  if (!changes[most]) return `No single token changes ${said(word.word)} when it is removed.`;
  const left = value - rows[most].removed;
  const without = `Removed one at a time, ${said(rows[most].label)} (position ${most + 1}) matters most. Without it, `;
  if (!against) return `${without}${said(word.word)} would have ${percent(chance(-left))} instead of ${percent(chance(-value))}.`;
  const lead = (/** @type {number} */ x) => {
    const [first, second] = x < 0 ? [against, word] : [word, against];
    return `${said(first.word)} ahead of ${said(second.word)} by ${number(Math.abs(x))} logits`;
  };
  return `${without}the model would have ${lead(left)}; with it, it has ${lead(value)}.`;
}

/** @param {any} state @param {any} data */
function flow(state, { flow: found }) {
  const { objective, tokens } = state.overview;
  const { position, before, word } = wordOf(state);
  const [top, bottom] = [found.rows[0], found.rows[found.rows.length - 1]];
  const most = largest(top.share);
  const signal = capital(signalOf(objective, word));
  if (!top.share[most]) return `${signal} is 0 at every token.`;
  const begins =
    `${signal} enters at ${bottom.label}, ${percent(bottom.share[position])} of it at ${said(before)}, before ${said(word)}. ` +
    `At ${top.label} ${percent(top.share[position])} is there`;
  if (most === position) return `${begins}, more than at any other token.`;
  return `${begins}, and most, ${percent(top.share[most])}, at ${said(tokens[most].label)} (position ${most + 1}).`;
}

/** @param {any} state @param {any} data */
function heads(state, { heads: found }) {
  const all = found.blocks.flatMap((/** @type {any[]} */ row, /** @type {number} */ b) =>
    row.map((head, i) => ({ b, i, size: head.incoming })),
  );
  const total = all.reduce((/** @type {number} */ sum, /** @type {any} */ one) => sum + one.size ** 2, 0);
  const signal = signalOf(state.overview.objective, wordOf(state).word);
  if (!total) return `Nothing of ${signal} reaches a head.`;
  const { b, i, size } = all[largest(all.map((/** @type {any} */ one) => one.size))];
  return (
    `Of ${signal}, head ${i + 1} of block ${b + 1} receives the most: length ${number(size)}, ` +
    `${percent(size ** 2 / total)} of the squares of ${all.length === 1 ? "the only head" : `all ${count(all.length, "head")}`}.`
  );
}

/** The head whose removal the gradient expects to change most: its block, its number and the expected change; undefined if
 * the model has no heads.
 * @param {{ heads: number[][] }} effects */
export function strongestHead({ heads: changes }) {
  const all = changes.flatMap((row, block) => row.map((predicted, head) => ({ block, head, predicted })));
  return all[largest(all.map((one) => Math.abs(one.predicted)))];
}

/** @param {any} state @param {any} data */
function whatif(state, { effects, result }) {
  const { objective } = state.overview;
  const quantity = quantityOf(objective, wordOf(state).word);
  if (result && "measured" in result) {
    const after = result.value + result.measured;
    return `Without ${result.label}, ${quantity} is ${number(after)} instead of ${number(result.value)}, as measured.`;
  }
  const strongest = strongestHead(effects);
  if (!strongest) return null;
  const { block, head, predicted } = strongest;
  const change = predicted < 0 ? `fall by ${number(-predicted)}` : `rise by ${number(predicted)}`;
  const which = `head ${head + 1} of block ${block + 1}`;
  return `Of all heads, the gradient expects most of ${which}: without it, ${quantity} would ${change}.`;
}

/** @param {any} state */
function step(state) {
  const { steps } = state.overview;
  const { before, word, share } = wordOf(state);
  const now = `${said(word)} has ${share} after ${said(before)}`;
  const question = state.predicts ? " How many steps does it take until it is the first choice?" : "";
  return steps ? `After ${count(steps, "step")}, ${now}.` : `${now}.${question}`;
}

/** @param {any} state @param {any} data */
function compare(state, { all }) {
  const { steps } = state.overview;
  const { word, share } = wordOf(state);
  const now = `${steps ? `After ${count(steps, "step")}` : "With the original weights"}, ${said(word)} has ${share}`;
  if (!all) return `${now}. ${steps ? "Which activations did the steps change?" : "Which activations would another sentence have?"}`;
  const changed = all.stations.map((/** @type {any} */ row) => row.a);
  const most = all.stations[largest(changed)];
  const { title, block } = state.table.stations.find((/** @type {any} */ one) => one.id === most.station);
  const place = `${title}${block === null ? "" : ` of block ${block + 1}`}`;
  return `${now}. Compared with the other trace, the activations differ most at ${place}: by ${percent(most.a)}.`;
}

/** @param {any} state @param {any} data */
function exercises(state, { course }) {
  const { length } = course.exercises.filter((/** @type {any} */ one) => one.stations.length);
  const signal = capital(signalOf(state.overview.objective, wordOf(state).word));
  const passed = `${signal} has passed ${count(state.table.stations.length - 1, "station")}`;
  return `${passed}. ${count(length, "exercise")} of ${course.exercises.length} ask what they do with it.`;
}

/** The sentence of each view, by its id, in the order of the story.
 * @type {Record<string, (state: any, data: any) => string | null>} */
export const LINES = { start, station, attribution, flow, heads, whatif, step, compare, exercises };

/** What the link to a view says. @param {string} view @param {string} word @param {[any, any] | null} question
 * @param {boolean} predicts  whether other texts can be predicted */
export function invitation(view, word, question, predicts) {
  if (view === "station")
    return question ? `why ${said(question[0].word)} and not ${said(question[1].word)}?` : `the loss of ${said(word)}`;
  if (view === "step") return predicts ? `take steps until it says ${said(word)}` : "take a step";
  return INVITATIONS[view];
}

/** @type {Record<string, string>} */
const INVITATIONS = {
  attribution: "which words made it so?",
  flow: "where did the error go?",
  heads: "which heads carried it?",
  whatif: "what if a head did not exist?",
  compare: "what did the steps change inside?",
  exercises: "write the backward pass yourself",
};
