// @ts-check
// The predictions for a sentence that is being typed: the forward pass alone, as views/predictions.py.

import { logChances, positionOf } from "./chances.js";
import { rowOf } from "./matrices.js";

/** @param {import("./session.js").Session} session @param {{ text: string, version?: number }} given */
export function predict(session, { text, version = 0 }) {
  const ids = session.encode(text);
  const logits = session.run(version, ids, { forwardOnly: true }).get("a_12");
  const positions = ids.map((id, t) => positionOf(session, logChances(rowOf(logits, t)), id, ids[t + 1] ?? -1, 5));
  const losses = positions.flatMap(({ loss }) => (loss === null ? [] : [loss]));
  return { text, tokens: session.tokens(ids), losses, positions };
}
