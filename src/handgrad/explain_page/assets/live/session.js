// @ts-check
// A model, its traced sentences and the versions of its weights, as session/session.py: a traced sentence is one sentence run
// on one version of the weights and differentiated for one objective. It is run again if it was dropped.

import { EngineError } from "../engine/errors.js";
import { symbols } from "../engine/model.js";
import { run } from "../engine/transformer.js";
import { readModel } from "../engine/weights.js";
import { RequestError } from "../request_error.js";
import { norm } from "./matrices.js";
import { Network } from "./network.js";
import { grouped } from "./notation.js";
import { SENTENCE } from "./objectives.js";

const MAX_TEXT_BYTES = 4000; // as session.py
const TRACES = 6; // most traces and
const VERSIONS = 8; // most versions in memory; the newest are kept

/**
 * @typedef {import("../engine/matrix.js").Matrix} Matrix
 * @typedef {object} Traced
 * @property {string} id
 * @property {string} text
 * @property {number} version
 * @property {number[]} ids
 * @property {number[]} targets  −1 at the last position
 * @property {import("../engine/trace.js").Trace} trace
 * @property {import("./objectives.js").Objective} objective
 * @typedef {{ model: import("../engine/model.js").Model, state: import("../engine/optimizers.js").State | null, steps: number }} Version
 */

export class Session {
  /** @param {any} data  what live_data.py has written */
  constructor(data) {
    const { model, tokenizer } = readModel(data.engine);
    this.table = data.table;
    this.course = data.course;
    this.config = model.config;
    this.tokenizer = tokenizer;
    this.maxTokens = data.max_tokens;
    this.network = new Network(data.steps);
    /** @type {import("./network.js").Station[]} */ this.stations = data.stations;
    /** @type {Map<number, Version>} */
    this.versions = new Map([[0, { model, state: null, steps: 0 }]]);
    /** @type {Map<string, Traced>} */ this.traced = new Map();
    /** @type {Map<string, [string, number, import("./objectives.js").Objective]>} */ this.requests = new Map();
    this.made = 0; // how many versions there ever were, besides the first
  }

  /** @param {string} id */
  station(id) {
    const found = this.stations.find((station) => station.id === id);
    if (!found) throw new RequestError(`there is no station '${id}': valid ids are a_0, a_1, blocks.0.a_2 … a_12, loss`);
    return found;
  }

  // ── sentences ───────────────────────────────────────────────────────────────────────────────────────────────────

  /** A sentence traced on a version of the weights for an objective. @param {string} text @param {number} version
   * @param {import("./objectives.js").Objective} objective @returns {Traced} */
  sentence(text, version = 0, objective = SENTENCE) {
    const id = JSON.stringify([version, Object.values(objective), text]);
    let found = this.traced.get(id);
    if (!found) {
      const ids = this.encode(text);
      const trace = this.run(version, ids, { objective });
      found = { id, text, version, ids, targets: [...ids.slice(1), -1], trace, objective };
      this.requests.set(id, [text, version, objective]);
    }
    this.traced.delete(id);
    this.traced.set(id, found);
    dropOldest(this.traced, TRACES);
    return found;
  }

  /** @param {string} id */
  find(id) {
    const request = this.requests.get(id);
    if (!request) throw new RequestError("this sentence id is not known: reload the page");
    return this.sentence(...request);
  }

  /** @param {number} version @param {number[]} ids @param {Parameters<typeof run>[2]} options */
  run(version, ids, options) {
    try {
      return run(this.modelAt(version), ids, options);
    } catch (reason) {
      throw reason instanceof EngineError ? new RequestError(reason.message) : reason;
    }
  }

  /** @param {string} text */
  encode(text) {
    if (/\p{Surrogate}/u.test(text))
      throw new RequestError("the sentence contains half a character (a lone surrogate): type it again");
    const size = new TextEncoder().encode(text).length;
    if (size > MAX_TEXT_BYTES)
      throw new RequestError(
        `the sentence has ${grouped(size)} bytes; at most ${grouped(MAX_TEXT_BYTES)} are allowed: shorten it`,
      );
    const ids = this.idsOf(text);
    if (ids.length < 2) throw new RequestError("a sentence needs at least two tokens: one to read and one to predict");
    if (ids.length > this.maxTokens)
      throw new RequestError(
        `the sentence has ${ids.length} tokens; this page shows at most ${this.maxTokens} for this model: shorten it`,
      );
    return ids;
  }

  /** @param {string} text @returns {number[]} */
  idsOf(text) {
    try {
      return this.tokenizer.encode(text);
    } catch (reason) {
      throw reason instanceof EngineError ? new RequestError(reason.message) : reason;
    }
  }

  /** @param {number} id @returns {string} */
  tokenText(id) {
    return this.tokenizer.decode([id]);
  }

  /** @param {Traced} sentence */
  labels(sentence) {
    return sentence.ids.map((id) => this.tokenText(id));
  }

  /** @param {number[]} ids */
  tokens(ids) {
    return ids.map((id) => ({ id, label: this.tokenText(id) }));
  }

  // ── versions of the weights ─────────────────────────────────────────────────────────────────────────────────────

  /** @param {number} number @returns {Version} */
  version(number) {
    const found = this.versions.get(number);
    if (!found)
      throw new RequestError(
        "the weights after these steps were deleted to save memory: press reset and take the steps again",
      );
    return found;
  }

  /** @param {number} version */
  modelAt(version) {
    return this.version(version).model;
  }

  /** @param {Version} version */
  addVersion(version) {
    const number = ++this.made;
    this.versions.set(number, version);
    for (const old of [...this.versions.keys()].slice(1, -VERSIONS)) this.versions.delete(old); // never the first one
    return number;
  }

  /** A parameter by the name of its gradient in a trace: blocks.0.grad_w_q. @param {number} version @param {string} gradient
   * @returns {Matrix} */
  parameter(version, gradient) {
    const found = symbols(this.modelAt(version).network).get(gradient);
    if (!found) throw new RequestError(`the model has no parameter of ${gradient}`);
    return found;
  }
}

/** The length of a parameter's gradient. @param {Traced} sentence @param {string} gradient */
export const gradientNorm = ({ trace }, gradient) => norm(trace.get(gradient).data);

/** Keep the newest entries. @param {Map<any, any>} cache @param {number} most */
function dropOldest(cache, most) {
  for (const key of [...cache.keys()].slice(0, -most)) cache.delete(key);
}
