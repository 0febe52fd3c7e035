// @ts-check
// The checks of every station on a sentence, one after the other between the requests of the page, as proofs/prover.py. The
// station that was asked for last comes first.

import { differencesOf, identitiesOf } from "./checks.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Traced} Traced */
/** @typedef {import("./checks.js").Check} Check */
/** The checks that were made, and those that are still to be made.
 * @typedef {{ made: Check[], open: (() => Check)[] }} Progress */

const SENTENCES = 2; // most sentences whose results are kept

export class Prover {
  /** @param {Session} session */
  constructor(session) {
    this.session = session;
    /** @type {Map<string, { stations: Map<string, Progress>, problem: string }>} */ this.known = new Map();
    this.sentence = ""; // the one that was asked for last, and
    this.station = ""; // its station
  }

  /** The results of one station so far. @param {Traced} sentence @param {string} station */
  request(sentence, station) {
    const results = this.results(sentence);
    this.station = this.session.station(station).id;
    const found = /** @type {Progress} */ (results.stations.get(station));
    return { ...summary(found, results.problem), problem: results.problem, checks: found.made };
  }

  /** The results of all stations in brief. @param {Traced} sentence */
  requestAll(sentence) {
    const { stations, problem } = this.results(sentence);
    return Object.fromEntries([...stations].map(([id, found]) => [id, summary(found, problem)]));
  }

  /** @param {Traced} sentence */
  results(sentence) {
    this.sentence = sentence.id;
    let found = this.known.get(sentence.id);
    if (!found) {
      const held = identitiesOf(this.session, sentence);
      const start = (/** @type {any} */ s) => [s.id, { made: held.get(s.id) ?? [], open: differencesOf(sentence, s) }];
      found = { stations: new Map(this.session.stations.map((s) => /** @type {any} */ (start(s)))), problem: "" };
      this.known.set(sentence.id, found);
      for (const id of [...this.known.keys()].slice(0, -SENTENCES)) this.known.delete(id);
    }
    return found;
  }

  /** Make one check. Returns whether there was one to make. */
  work() {
    const results = this.known.get(this.sentence);
    if (!results || results.problem) return false;
    const asked = results.stations.get(this.station);
    const next = asked?.open.length ? asked : [...results.stations.values()].find(({ open }) => open.length);
    const check = next?.open.shift();
    if (!next || !check) return false;
    try {
      next.made = [...next.made, check()];
    } catch (reason) {
      results.problem = String(reason); // the page must report it instead of waiting forever
    }
    return true;
  }
}

/** @param {Progress} progress @param {string} problem */
function summary({ made, open }, problem) {
  const failed = made.some(({ passed }) => !passed);
  if (problem && open.length) return { passed: failed ? false : null, state: "failed" };
  if (open.length) return { passed: failed ? false : null, state: "measuring" };
  return { passed: !failed, state: "done" };
}
