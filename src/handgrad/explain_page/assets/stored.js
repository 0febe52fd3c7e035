// @ts-check
// Answers that an exported file contains, for one sentence.

import { RequestError } from "./request_error.js";

/** The key of an answer, as Route.key in routes.py makes it. @param {string} name @param {Record<string, any>} parameters */
export function keyOf(name, parameters) {
  const rest = new URLSearchParams(parameters).toString();
  return rest ? `${name}?${decodeURIComponent(rest)}` : name;
}

/** The command that shows a sentence with all that a stored page does not contain. @param {string} command  that serves the
 * page of the model; "" if there is none @param {string} text */
export const commandFor = (command, text) =>
  command ? `${command} --text '${text.replaceAll("'", String.raw`'\''`)}'` : "handgrad explain";

/** What is said of an answer that is not stored. @param {string} command @param {string} text */
export const absent = (command, text) =>
  new RequestError(`This page does not contain that. To see it, run: ${commandFor(command, text)}`);

/** @param {Record<string, any>} answers  by their keys */
export const stored = (answers) => ({
  /** @type {import("./api.js").Provider["has"]} */
  has: (name, parameters) => keyOf(name, parameters) in answers,
  /** @type {import("./api.js").Provider["get"]} */
  async get(name, _id, parameters) {
    const key = keyOf(name, parameters);
    if (!(key in answers)) throw absent(answers.command, answers.overview.text);
    return answers[key];
  },
  /** @type {import("./api.js").Provider["post"]} */
  async post() {
    throw absent(answers.command, answers.overview.text);
  },
  command: answers.command,
});
