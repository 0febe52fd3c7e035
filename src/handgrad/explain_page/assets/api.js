// @ts-check
// The interface through which the page gets its data. Behind it is the local server, or a file's own program and model, or the
// answers that a file contains; the page asks whether there is an answer, not who gives it.

import { folder } from "./folder.js";
import { written } from "./format.js";
import { live } from "./live.js";
import { RequestError } from "./request_error.js";
import { server } from "./server.js";
import { absent, stored } from "./stored.js";

/**
 * @typedef {object} Provider
 * @property {(name: string, parameters: Record<string, any>) => boolean} has  whether it answers this request
 * @property {(name: string, id: string | null, parameters: Record<string, any>) => Promise<any>} get
 * @property {(name: string, body: any) => Promise<any>} post
 * @property {string} [command]  that shows what it has no answer to; "" if there is none
 * @property {{ id: string, text: string }[]} [sentences]  those that can be chosen, if no others are answered
 * @property {string} [model]  the one of `models` that answers
 * @property {{ name: string, text: string, live: boolean }[]} [models]  that can be chosen
 */

/** @returns {Provider} */
function chosen() {
  const textOf = (/** @type {string} */ id) => document.getElementById(id)?.textContent;
  const [answers, program, model, index] = ["embedded-answers", "live-program", "live-model", "stored-answers"].map(textOf);
  if (index) return folder(JSON.parse(index), new URLSearchParams(location.search).get("model"));
  if (answers) return stored(JSON.parse(answers));
  if (program && model) return live(Promise.resolve({ source: program, data: model }));
  return server(new URLSearchParams(location.search).get("key") ?? "");
}

const provider = chosen();

const READERS = ["text", "label", "word", "token", "target"]; // fields with the reader's own words, which stay as they are

/** Write the numbers inside the sentences of an answer, in place. @param {any} x @returns {any} */
function withNumbers(x) {
  if (x === null || typeof x !== "object" || (Array.isArray(x) && typeof x[0] === "number")) return x;
  for (const [key, value] of Object.entries(x))
    if (typeof value !== "string") withNumbers(value);
    else if (value.includes("⟦") && !READERS.includes(key)) x[key] = written(value);
  return x;
}

/** @param {Promise<any>} request */
async function answered(request) {
  try {
    return withNumbers(await request);
  } catch (reason) {
    throw reason instanceof RequestError ? new RequestError(written(reason.message)) : reason;
  }
}

const CHANGING = ["table", "overview", "proof", "proofs", "learn", "progress"]; // answers that are not cached
const CACHE_SIZE = 80;
const cache = new Map();

/** `name` of the request, `id` of the traced sentence, and further parameters.
 * @param {string} name @param {string | null} id @param {Record<string, any>} parameters */
export async function get(name, id = null, parameters = {}) {
  const ask = () => answered(provider.get(name, id, parameters));
  if (CHANGING.includes(name)) return ask();
  const key = JSON.stringify([name, id, parameters]);
  if (!cache.has(key)) {
    const answer = ask();
    cache.set(key, answer);
    answer.catch(() => cache.delete(key));
    if (cache.size > CACHE_SIZE) cache.delete(cache.keys().next().value);
  }
  return cache.get(key);
}

/** A request that computes something new. @param {string} name @param {any} body */
export const post = (name, body) => answered(provider.post(name, body));

/** Whether this request has an answer here. @param {string} name @param {Record<string, any>} parameters */
export const has = (name, parameters = {}) => provider.has(name, parameters);

// What a stored page may have, as Provider says.
export const command = provider.command ?? "";
export const sentences = provider.sentences ?? null;
export const models = provider.models ?? [];
export const model = provider.model ?? "";

/** The stored sentence of this text; null of a file with one sentence. @param {string} text */
export function storedId(text) {
  if (!sentences) return null;
  const found = sentences.find((sentence) => sentence.text === text);
  if (!found) throw absent(command, text);
  return found.id;
}

/** Wait before asking again. @param {number} ms */
export const pause = (ms) => new Promise((done) => setTimeout(done, ms));
