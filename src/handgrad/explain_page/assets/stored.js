// @ts-check
// Answers that an exported file contains, for one sentence.

import { RequestError } from "./request_error.js";

/** The key of an answer, as Route.key in routes.py makes it. @param {string} name @param {Record<string, any>} parameters */
function keyOf(name, parameters) {
  const rest = new URLSearchParams(parameters).toString();
  return rest ? `${name}?${decodeURIComponent(rest)}` : name;
}

/** @param {Record<string, any>} answers  by their keys */
export const stored = (answers) => ({
  /** @type {import("./api.js").Provider["has"]} */
  has: (name, parameters) => keyOf(name, parameters) in answers,
  /** @type {import("./api.js").Provider["get"]} */
  async get(name, _id, parameters) {
    const key = keyOf(name, parameters);
    if (!(key in answers)) throw new RequestError("This file does not contain that. Run handgrad explain to see it.");
    return answers[key];
  },
  /** @type {import("./api.js").Provider["post"]} */
  async post() {
    throw new RequestError("This file shows one sentence. Run handgrad explain to change it.");
  },
  /** Steps that were taken before: for each learning rate, the list of answers. @type {Record<string, any[]>} */
  steps: answers.steps,
});
