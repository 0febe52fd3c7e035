// @ts-check
// A model from the data of a page, as engine_data.py writes it: the numbers of a weight are float32 in base64, low byte first.

import { matrix } from "./matrix.js";
import { loadModel } from "./model.js";
import { Tokenizer } from "./tokenizer.js";

/** @typedef {{ config: import("./model.js").Config, vocabulary: string[],
 *   weights: Record<string, { rows: number, cols: number, float32: string }> }} EngineData */

/** @param {EngineData} data */
export function readModel({ config, vocabulary, weights }) {
  const read = Object.entries(weights).map(([name, { rows, cols, float32 }]) => {
    const text = atob(float32);
    const bytes = new Uint8Array(text.length);
    for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
    const data = new Float64Array(new Float32Array(bytes.buffer)); // all browsers run where the low byte is first
    return /** @type {const} */ ([name, matrix(rows, cols, data)]);
  });
  return { model: loadModel(config, new Map(read)), tokenizer: new Tokenizer(vocabulary) };
}
