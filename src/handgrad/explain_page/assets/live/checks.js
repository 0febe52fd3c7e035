// @ts-check
// The checks of one station: finite differences of what is explained, and identities that hold for any numbers. As
// proofs/checks.py, whose comparisons with autograd are not possible here.

import { check_parameters, check_signal, identities, normal } from "../engine/differences.js";
import { symbol } from "./notation.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Traced} Traced */
/** @typedef {import("./network.js").Station} Station */
/** @typedef {{ what: string, kind: string, error: number, limit: number, passed: boolean }} Check */

/** The identities of all stations, by the station's id. @param {Session} session @param {Traced} sentence
 * @returns {Map<string, Check[]>} */
export function identitiesOf(session, sentence) {
  const every = identities(sentence.trace);
  const read = sentence.ids.map((id) => session.tokenText(id)).join("");
  const decoded = one("decoding the tokens gives the sentence", "identity", Number(read !== sentence.text), 0);
  return new Map(
    session.stations.map((station) => {
      const about = every.filter(({ name, what }) => tensorsOf(station, ROWS_AFTER.test(what)).includes(name));
      const checks = about.map(({ name, what, error, limit }) => one(sentenceOf(name, what), "identity", error, limit));
      return [station.id, station.kind === "tokens" ? [decoded] : checks];
    }),
  );
}

const ROWS_AFTER = /^the (last row|rows)/; // which the objective does not depend on

/** The tensors whose identities a station shows. @param {Station} station @param {boolean} incomingOnly */
function tensorsOf({ id, kind, a, incoming, outgoing }, incomingOnly) {
  if (incomingOnly) return incoming;
  const inside = kind === "attention" ? ["rho", "delta_k"].map((name) => a[0].replace("a_3", name)) : [];
  const tied = ["a_1", "a_12"].includes(id) ? ["grad_w_tok"] : [];
  return [...incoming, ...outgoing, ...inside, ...tied];
}

/** “each row of Δ₅ sums to 0” @param {string} name @param {string} what */
function sentenceOf(name, what) {
  const shown = name.endsWith(".rho") ? "ρ" : name === "grad_w_tok" ? "∂w_tok" : symbol(name);
  if (/^each (row|column) sums/.test(what)) return what.replace(" sums", ` of ${shown} sums`);
  return ROWS_AFTER.test(what) ? what : `${shown} is ${what}`;
}

/** The checks of a station by finite differences, each still to be made. @param {Traced} sentence @param {Station} station
 * @returns {(() => Check)[]} */
export function differencesOf({ trace }, { incoming, outgoing, parameters }) {
  const random = normal(0);
  const made = (/** @type {string} */ what, /** @type {import("../engine/differences.js").Difference} */ { error, limit }) =>
    one(what, "differences", error, limit);
  const signals = [...new Set([...outgoing, ...incoming])].map(
    (name) => () => made(`${symbol(name)} along a random direction`, check_signal(trace, name, random)),
  );
  const names = [...new Set(parameters.map(({ name }) => name))];
  const all = () => made("all gradients here along a random direction", check_parameters(trace, names, random));
  return names.length ? [...signals, all] : signals;
}

/** @param {string} what @param {string} kind @param {number} error @param {number} limit @returns {Check} */
const one = (what, kind, error, limit) => ({ what, kind, error, limit, passed: error <= limit });
