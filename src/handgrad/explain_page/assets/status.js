// @ts-check
// The progress bar and the line that says what is happening or what went wrong.

import { find } from "./render.js";

const SOON = 120,
  LATE = 300; // milliseconds after which a wait shows the bar, and says what is computed
let pending = 0; // open requests

/** Show the progress bar until a promise settles, and after a moment what it waits for.
 * @template T @param {Promise<T>} promise @param {() => string} what @returns {Promise<T>} */
export async function busy(promise, what = () => "") {
  pending++;
  let said = "";
  const bar = setTimeout(() => (find("progress").hidden = false), SOON);
  const words = setTimeout(() => {
    if (!find("status").textContent) setStatus((said = what()));
  }, LATE);
  try {
    return await promise;
  } finally {
    clearTimeout(bar);
    clearTimeout(words);
    if (said && find("status").textContent === said) setStatus("");
    if (--pending === 0) find("progress").hidden = true;
  }
}

/** @param {string} text */
export function setStatus(text, problem = false) {
  const status = find("status");
  if (status.textContent !== text) status.textContent = text;
  status.className = problem ? "problem" : "";
}
