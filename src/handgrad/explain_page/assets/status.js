// @ts-check
// The progress bar and the line that says what is happening or what went wrong.

import { find } from "./render.js";

let pending = 0; // open requests

/** Show the progress bar until a promise settles. @template T @param {Promise<T>} promise @returns {Promise<T>} */
export async function busy(promise) {
  pending++;
  const late = setTimeout(() => (find("progress").hidden = false), 120);
  try {
    return await promise;
  } finally {
    clearTimeout(late);
    if (--pending === 0) find("progress").hidden = true;
  }
}

/** @param {string} text */
export function setStatus(text, problem = false) {
  const status = find("status");
  if (status.textContent !== text) status.textContent = text;
  status.className = problem ? "problem" : "";
}
