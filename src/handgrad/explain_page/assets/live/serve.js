// @ts-check
// Answers the requests that arrive at a port, one after the other, and makes the checks while there are none. The port is a
// worker's, or one in the page where a browser allows no worker.
//
//     { data }                   the model, first of all        → { ready: true }
//     { number, name, given }    a request                      → { number, text } or { number, error, known }

import { RequestError } from "../request_error.js";
import { Prover } from "./prover.js";
import { answer } from "./routes.js";
import { Session } from "./session.js";

const IDLE = 40; // milliseconds without a request before a check

/** @param {any} port */
export function serve(port) {
  /** @type {Session} */ let session;
  /** @type {Prover} */ let prover;
  /** @type {any} */ let next; // the timer of the next check

  const check = () => {
    if (prover.work()) next = setTimeout(check); // requests that have arrived meanwhile come first
  };

  port.onmessage = ({ data: { data, number, name, given } }) => {
    clearTimeout(next);
    if (data) {
      session = new Session(JSON.parse(data));
      prover = new Prover(session);
      return port.postMessage({ ready: true });
    }
    try {
      port.postMessage({ number, text: JSON.stringify(answer(session, prover, name, given)) }); // infinity becomes null
    } catch (reason) {
      const known = reason instanceof RequestError;
      port.postMessage({ number, error: known ? reason.message : String(/** @type {any} */ (reason)?.stack ?? reason), known });
    }
    next = setTimeout(check, IDLE);
  };
}
