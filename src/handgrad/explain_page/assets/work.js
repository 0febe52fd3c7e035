// @ts-check
// Answers to several requests, and what a wait for them is for, in words: what each computes, or that a stored part is loaded.

import { get, sentences } from "./api.js";
import { busy } from "./status.js";

/** @type {Record<string, string>} */
const WORK = {
  station: "Drawing the matrices of this station…",
  flow: "Measuring ‖a‖ and ‖Δ‖ of every token at every station…",
  head: "Drawing this head…",
  heads: "Drawing every head…",
  lens: "Reading the residual stream as logits…",
  neurons: "Ranking the neurons of this block…",
  swaps: "Estimating the loss with other tokens…",
  follow: "Listing the terms of this number…",
  attribution: "Computing attributions: many forward and backward passes, and one without each token…",
  effects: "Predicting what every part contributes…",
  "what-if": "Measuring: a pass without this part…",
  compare: "Comparing the two traces…",
};

/** @param {string} name  of a request */
const workOf = (name) => (sentences ? "Loading this part of the page…" : WORK[name] ?? "Computing…");

/** @param {Record<string, [string, object]>} needs  requests with their parameters @param {string} id  of the sentence
 * @returns {Promise<Record<string, any>>} */
export async function answersTo(needs, id) {
  const open = new Set(Object.values(needs).map(([request]) => request));
  const one = async (/** @type {[string, [string, object]]} */ [name, [request, parameters]]) => {
    const answer = await get(request, id, parameters);
    open.delete(request);
    return [name, answer];
  };
  const all = Promise.all(Object.entries(needs).map(one));
  return Object.fromEntries(await busy(all, () => workOf([...open][0])));
}
