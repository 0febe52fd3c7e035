// @ts-check
// A traced sentence as a whole, and the gradient flow, as views/overview.py.

import { concat_columns } from "../engine/matrix.js";
import { aboutGroups } from "./captions.js";
import { lossesOf } from "./chances.js";
import { rowNorms, sum } from "./matrices.js";
import { hereOf, isOverVocabulary } from "./network.js";
import { letterOf, quoted, signal, symbol, symbols } from "./notation.js";
import { describe } from "./objectives.js";
import { gradientNorm } from "./session.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Traced} Traced */
/** @typedef {import("./network.js").Station} Station */

/** The tokens, the loss, ‖a‖ and ‖Δ‖ per token at every station, and the norm of every gradient.
 * @param {Session} session @param {Traced} sentence */
export function overview(session, sentence) {
  const losses = lossesOf(sentence.trace.get("a_12"), sentence.targets);
  const [groups, sizes] = groupsOf(session, sentence);
  return {
    id: sentence.id,
    text: sentence.text,
    version: sentence.version,
    steps: session.version(sentence.version).steps,
    tokens: session.tokens(sentence.ids),
    loss: sum(losses) / losses.length,
    losses,
    objective: describe(session, sentence),
    flows: session.stations.map((s) => ({
      id: s.id,
      a: lengths(sentence, s.kind === "loss" ? [] : s.a),
      delta: lengths(sentence, s.incoming),
    })),
    groups,
    groups_caption: aboutGroups(sizes),
  };
}

/** @param {Traced} sentence @param {string[]} names */
const lengths = (sentence, names) => (names.length ? lengthsOf(sentence, names) : null);

/** The length of each token's row, over all these matrices side by side. @param {Traced} sentence @param {string[]} names */
const lengthsOf = ({ trace }, names) => rowNorms(concat_columns(names.map((name) => trace.get(name))));

/** The norm of every parameter's gradient, layer by layer. @param {Session} session @param {Traced} sentence
 * @returns {[any[], Map<string, number>]} */
function groupsOf(session, sentence) {
  /** @type {any[]} */ const groups = [];
  const sizes = new Map();
  for (const station of session.stations)
    for (const { symbol, gradient, shared } of station.parameters) {
      if (shared) continue;
      const end = station.kind === "embedding" ? "embedding" : "head";
      const layer = station.block === null ? end : `block ${station.block + 1}`;
      const where = symbol === "w_tok" && session.config.tied ? `${layer} and logits (tied)` : layer;
      const norm = gradientNorm(sentence, gradient);
      groups.push({ layer, where, station: station.id, symbol, norm });
      sizes.set(`${symbol} in ${where}`, norm);
    }
  return [groups, sizes];
}

// ── the gradient flow ───────────────────────────────────────────────────────────────────────────────────────────────

/** The error of every token at every depth. What an addition adds has the addition's error signal: both are one row.
 * @param {Session} session @param {Traced} sentence */
export function flow(session, sentence) {
  const stations = session.stations.filter((s) => s.kind !== "tokens" && !isOverVocabulary(s) && !session.network.added(s.a[0]));
  const rows = stations.map((s) => {
    const [a, delta] = [s.a, s.incoming].map((names) => lengthsOf(sentence, names));
    const squares = delta.map((x) => x * x),
      all = Math.max(sum(squares), 1e-300);
    const where = s.block === null ? "" : ` of block ${s.block + 1}`;
    const equal = s.inputs.filter((name) => session.network.added(name)).map((name) => symbol(signal(name)));
    const ends = s.block === null || s.a[0] === `${hereOf(s)}a_10`;
    return {
      station: s.id,
      inside: ends ? null : s.block,
      label: `${[...equal, symbols(s.incoming)].join(" = ")}${where}`,
      a_label: `${symbols(s.a)}${where}`,
      name: s.incoming[0],
      a,
      delta,
      share: squares.map((x) => x / all),
      python: `trace['${s.incoming[0]}'].norm(dim=1)`,
    };
  });
  return { rows, python: flowPython(session, stations) };
}

/** The lines of Python that make the data of the gradient flow. @param {Session} session @param {Station[]} stations */
function flowPython({ config, network }, stations) {
  const inside = stations.filter((s) => s.block === 0).map((s) => `[${s.incoming.map(letterOf).map(quoted).join(", ")}]`);
  const lengths =
    `parts = [${inside.join(", ")}]\n\ndef lengths(kind):\n` +
    `    inside = [[f'blocks.{b}.{kind}_{i}' for i in part] for b in range(${config.n_blocks})` +
    " for part in parts]\n" +
    `    rows = [[f'blocks.0.{kind}_${letterOf(network.start)}'], *inside, [f'{kind}_11']]\n` +
    "    return torch.stack([torch.cat([trace[x] for x in row], 1).norm(dim=1) for row in rows])\n\n";
  return {
    share: `${lengths}lengths('delta') ** 2 / (lengths('delta') ** 2).sum(1, keepdim=True)`,
    delta: `${lengths}lengths('delta')`,
    product: `${lengths}lengths('a') * lengths('delta')`,
    a: `${lengths}lengths('a')`,
  };
}
