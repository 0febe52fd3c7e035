// @ts-check
// The progress of a trace: which pass has reached which block. Before the first view it is shown in the middle of the page,
// later in the status line.

import { get, has, pause } from "./api.js";
import { find } from "./render.js";
import { setStatus } from "./status.js";

const FIRST = 200,
  INTERVAL = 250; // milliseconds


/** “Forward pass, block 3 of 30”
 * @param {{ busy: boolean, compiling: boolean, backward: boolean, block: number, blocks: number }} found */
function progressText({ busy, compiling, backward, block, blocks }) {
  if (compiling) return "Compiling kernels for this machine, once: a few seconds…";
  return busy ? `${backward ? "Backward" : "Forward"} pass, block ${block + 1} of ${blocks}` : "Preparing the page…";
}

/** Show how far the trace has come until a request is answered.
 * @template T @param {Promise<T>} request @returns {Promise<T>} */
export async function withProgress(request) {
  let waiting = has("progress");
  const follow = async () => {
    for (let ms = FIRST; waiting; ms = INTERVAL) {
      await pause(ms);
      if (!waiting) return;
      const found = await get("progress").catch(() => null);
      if (waiting && found) say(found);
    }
  };
  follow();
  try {
    return await request;
  } finally {
    waiting = false;
  }
}

/** @param {any} found */
function say(found) {
  const text = progressText(found);
  if (find("opening").hidden) return found.busy && setStatus(text);
  find("opening-text").textContent = text;
  if (found.busy) find("opening-bar").value = found.share;
}
