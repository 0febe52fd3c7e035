// @ts-check
// Requests to the server. In an exported file the answers are embedded in the page, and nothing is requested.

import { written } from "./format.js";

const READERS = ["text", "label", "word", "token", "target"]; // fields with the reader's own words, which stay as they are

/** @param {string} text */
const parse = (text) =>
  JSON.parse(text, (key, value) =>
    typeof value === "string" && value.includes("⟦") && !READERS.includes(key) ? written(value) : value,
  );

const embedded = document.getElementById("embedded-answers");
const answers = embedded ? parse(embedded.textContent ?? "") : null;
export const offline = answers !== null;

const key = new URLSearchParams(location.search).get("key") ?? ""; // without it the server answers nothing

export class RequestError extends Error {}

/** @param {string} path @param {RequestInit} options */
async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(`/api/${path}`, { ...options, headers: { ...options.headers, "X-Handgrad-Key": key } });
  } catch {
    throw new RequestError("No response from handgrad. Is it still running?");
  }
  let body;
  try {
    body = parse(await response.text());
  } catch {
    throw new RequestError(`handgrad responded with status ${response.status}`);
  }
  if (!response.ok) throw new RequestError(body.error || `handgrad responded with status ${response.status}`);
  return body;
}

const CHANGING = ["table", "overview", "proof", "proofs", "learn", "progress"]; // answers that are not cached
const CACHE_SIZE = 80;
const cache = new Map();

/** GET: `name` of the request, `id` of the traced sentence, and further parameters.
 * @param {string} name @param {string | null} id @param {Record<string, any>} parameters */
export async function get(name, id = null, parameters = {}) {
  if (offline) {
    const rest = new URLSearchParams(parameters).toString();
    const key = rest ? `${name}?${decodeURIComponent(rest)}` : name;
    if (!(key in answers)) throw new RequestError("This file does not contain that. Run handgrad explain to see it.");
    return answers[key];
  }
  const path = `${name}?${new URLSearchParams({ ...(id ? { id } : {}), ...parameters })}`;
  if (CHANGING.includes(name)) return request(path);
  if (!cache.has(path)) {
    const answer = request(path);
    cache.set(path, answer);
    answer.catch(() => cache.delete(path));
    if (cache.size > CACHE_SIZE) cache.delete(cache.keys().next().value);
  }
  return cache.get(path);
}

/** @param {string} name @param {object} body */
export async function post(name, body) {
  if (offline) throw new RequestError("This file shows one sentence. Run handgrad explain to change it.");
  return request(name, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
}

/** Wait before asking again. @param {number} ms */
export const pause = (ms) => new Promise((done) => setTimeout(done, ms));

/** Whether the exported file has an answer; a server has all. @param {string} key */
export const has = (key) => !offline || key in answers;

/** Precomputed steps of an exported file: for each learning rate, the list of answers. */
export const embeddedSteps = () => answers.steps;
