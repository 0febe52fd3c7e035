// @ts-check
// Answers that a part of a view asks for when it is drawn: what it needs depends on an answer before it.

import { get } from "./api.js";

const MOST = 120;
/** @type {Map<string, { data: any, problem: string }>} */
const found = new Map();

/** The answer, or null until it is there; then the page is drawn again.
 * @param {any} state @param {any} actions @param {string} name @param {Record<string, any>} parameters */
export function later(state, actions, name, parameters) {
  const { id } = state.overview,
    key = JSON.stringify([id, name, parameters]);
  const known = found.get(key);
  if (known) return known.data === null && !known.problem ? null : known;
  const mine = { data: null, problem: "" };
  found.set(key, mine);
  if (found.size > MOST) found.delete(found.keys().next().value ?? "");
  actions
    .busy(get(name, id, parameters))
    .then((/** @type {any} */ data) => (mine.data = data))
    .catch((/** @type {Error} */ reason) => (mine.problem = reason.message))
    .finally(actions.redraw);
  return null;
}
