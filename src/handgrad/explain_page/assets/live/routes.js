// @ts-check
// The requests of the page, in a table, as routes.py: a function's parameters are the session, the sentence that a request
// names by its id, and the request's other parameters.

import { RequestError } from "../request_error.js";
import { allHeads, atHead } from "./attention.js";
import { attribution } from "./attribution.js";
import { compareAt } from "./compare.js";
import { follow } from "./follow.js";
import { lens } from "./lens.js";
import { neurons } from "./neurons.js";
import { objectiveOf, tokenId } from "./objectives.js";
import { flow, overview } from "./overview.js";
import { patchAt, patchMapAt } from "./patching.js";
import { predict } from "./predictions.js";
import { atStation } from "./station.js";
import { step } from "./step.js";
import { swapsAt } from "./swaps.js";
import { entriesOf, sliceOf, valueAt } from "./values.js";
import { effects, whatIfAt } from "./what_if.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Traced} Traced */
/** @typedef {import("./prover.js").Prover} Prover */

/** @type {Record<string, (session: Session, given: any) => any>} */
const OF_A_MODEL = {
  table: ({ table }) => table,
  learn: ({ course }) => course,
  predict,
  token(session, { text }) {
    const id = tokenId(session, text);
    return { id, word: session.tokenText(id) };
  },
  sentence(session, { text, version = 0, objective = {} }) {
    return overview(session, session.sentence(text, version, objectiveOf(session, text, version, objective ?? {})));
  },
};

/** @type {Record<string, (session: Session, sentence: Traced, given: any) => any>} */
const OF_A_SENTENCE = {
  overview,
  flow,
  station: atStation,
  swaps: swapsAt,
  head: atHead,
  heads: allHeads,
  lens,
  neurons,
  follow,
  slice: sliceOf,
  value: valueAt,
  matrix: entriesOf,
  attribution,
  effects,
  "what-if": whatIfAt,
  compare: compareAt,
  "patch-map": patchMapAt,
  patch: patchAt,
  step,
};

/** @type {Record<string, (prover: Prover, sentence: Traced, given: any) => any>} */
const OF_THE_PROVER = {
  proof: (prover, sentence, { station }) => prover.request(sentence, station),
  proofs: (prover, sentence) => prover.requestAll(sentence),
};

/** @param {Session} session @param {Prover} prover @param {string} name @param {Record<string, any>} given */
export function answer(session, prover, name, { id, ...given }) {
  const parameters = read(name, given);
  if (name in OF_A_MODEL) return OF_A_MODEL[name](session, parameters);
  const sentence = session.find(id);
  if (name in OF_THE_PROVER) return OF_THE_PROVER[name](prover, sentence, parameters);
  return OF_A_SENTENCE[name](session, sentence, parameters);
}

const NUMBERS = ["block", "head", "position", "neuron", "row", "column", "steps", "word", "against", "version", "lr"];

/** The parameters of a request as its function reads them: a number may be a text, a range is 0:16, a list 3,5,8.
 * @param {string} route @param {Record<string, any>} given */
function read(route, given) {
  const found = Object.entries(given).filter(([, value]) => value !== null && value !== undefined);
  return Object.fromEntries(found.map(([name, value]) => [name, readValue(route, name, value)]));
}

/** @param {string} route @param {string} name @param {any} value */
function readValue(route, name, value) {
  if (NUMBERS.includes(name)) return number(name, value);
  if (name !== "rows" && name !== "columns") return value;
  if (Array.isArray(value)) return value;
  const numbers = value.split(route === "matrix" ? "," : ":").map(Number);
  const range = route === "matrix" || numbers.length === 2;
  if (range && numbers.every(Number.isInteger)) return numbers;
  throw new RequestError(
    route === "matrix"
      ? `invalid list '${value}': write 3,5,8`
      : `invalid range '${value}': write from:to, for example 0:16`,
  );
}

/** @param {string} name @param {any} value */
function number(name, value) {
  const found = Number(value);
  if (Number.isFinite(found) && (name === "lr" || Number.isInteger(found))) return found;
  throw new RequestError(`invalid request: ${name}: a number is expected, not '${value}'`);
}
