// @ts-check
// Answers that this page computes itself: the model is in the file, and live/ computes in a worker, or in the page where the
// browser allows no worker.

import { RequestError } from "./request_error.js";

const ROUTES = new Set([
  "table", "learn", "predict", "token", "sentence", "overview", "flow", "station", "swaps", "head", "heads", "lens", "neurons",
  "follow", "slice", "value", "matrix", "attribution", "effects", "what-if", "compare", "patch-map", "patch", "step", "proof",
  "proofs",
]);

/** @param {Promise<{ source: string, data: string }>} loaded  the program, which defines serveLive, and what live_data.py has
 * written */
export function live(loaded) {
  /** @type {Map<number, { done: (answer: any) => void, fail: (reason: Error) => void }>} */
  const waiting = new Map();
  let requests = 0;

  const receive = (/** @type {any} */ { data: { number, text, error, known } }) => {
    const { done, fail } = waiting.get(number) ?? {};
    waiting.delete(number);
    if (error === undefined) done?.(JSON.parse(text));
    else fail?.(known ? new RequestError(error) : new Error(error));
  };
  const port = loaded.then(connect).then((found) => {
    found.onmessage = receive;
    return found;
  });

  /** @param {string} name @param {Record<string, any>} given @returns {Promise<any>} */
  const ask = async (name, given) => {
    if (!ROUTES.has(name)) throw new RequestError("This page has no server. Run handgrad explain for that.");
    const to = await port;
    return new Promise((done, fail) => {
      waiting.set(++requests, { done, fail });
      to.postMessage({ number: requests, name, given });
    });
  };
  return {
    /** @type {import("./api.js").Provider["has"]} */
    has: (name) => ROUTES.has(name),
    /** @type {import("./api.js").Provider["get"]} */
    get: (name, id, parameters) => ask(name, { id, ...parameters }),
    /** @type {import("./api.js").Provider["post"]} */
    post: ask,
  };
}

/** A port of the program, once it has read the model. @param {{ source: string, data: string }} loaded @returns {Promise<any>} */
function connect({ source, data }) {
  const open = (/** @type {any} */ port) =>
    new Promise((done, fail) => {
      port.onmessage = () => done(port);
      port.onerror = (/** @type {Event} */ event) => {
        event.preventDefault();
        fail(new Error("no worker"));
      };
      port.postMessage({ data });
    });
  const inPage = () => {
    const { port1, port2 } = new MessageChannel();
    const page = /** @type {any} */ (globalThis); // the source is a script of the page too
    page.handgradProgram?.(); // of a folder: defines serveLive
    page.serveLive(port2);
    return open(port1);
  };
  try {
    const address = URL.createObjectURL(new Blob([source, "\nserveLive(self);"], { type: "text/javascript" }));
    return open(new Worker(address)).catch(inPage);
  } catch {
    return inPage();
  }
}
