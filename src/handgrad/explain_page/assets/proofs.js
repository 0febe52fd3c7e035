// @ts-check
// Follows the checks while they are made: of all stations in brief, and of the open station in full.

import { get, pause } from "./api.js";
import { state } from "./state.js";

let brief = ""; // the sentence whose stations are being followed
let full = ""; // the sentence and the station that are being followed in full

/** Follow what is shown now; call `redraw` on news. @param {() => void} redraw */
export function follow(redraw) {
  followAll(redraw);
  followStation(redraw);
}

/** @param {() => void} redraw */
async function followAll(redraw) {
  const { id } = state.overview;
  if (brief === id) return;
  brief = id;
  while (state.overview.id === id) {
    const proofs = await ask("proofs", id, {});
    if (state.overview.id !== id) return;
    if (proofs.problem) {
      brief = ""; // the next view asks again
      return;
    }
    const changed = JSON.stringify(proofs) !== JSON.stringify(state.proofs);
    state.proofs = proofs;
    if (changed) redraw();
    // a large model is checked against finite differences at the open station only, so the rest stays unfinished
    const open = Object.values(proofs).some(
      (p) => p.state === "measuring" && (!state.table.large || p.passed === null),
    );
    if (!open) return;
    await pause(400);
  }
}

/** @param {() => void} redraw */
async function followStation(redraw) {
  const { id } = state.overview,
    { station } = state;
  const mine = `${id} ${station}`;
  if (full === mine || state.view !== "station") return;
  full = mine;
  state.proof = null;
  redraw();
  while (full === mine && state.overview.id === id && state.station === station) {
    const proof = await ask("proof", id, { station });
    if (full !== mine || state.overview.id !== id) return;
    state.proof = proof;
    redraw();
    if (proof.state !== "measuring") return;
    await pause(250);
  }
  if (full === mine) full = "";
}

/** @param {string} name @param {string} id @param {object} parameters @returns {Promise<any>} */
async function ask(name, id, parameters) {
  try {
    return await get(name, id, parameters);
  } catch (reason) {
    return { passed: null, state: "failed", checks: [], problem: /** @type {Error} */ (reason).message };
  }
}
