// @ts-check
// One head, forward and backward, and all of them in small, as views/attention.py.

import * as linear from "../engine/linear.js";
import { columns, matrix, plus, product, t as turned } from "../engine/matrix.js";
import { RequestError } from "../request_error.js";
import { ABOUT_SENT, aboutAttention, aboutBranches } from "./captions.js";
import { dot, largest, norm, range, rowOf, sum } from "./matrices.js";
import { typeset } from "./notation.js";
import { picture } from "./pictures.js";

/** @typedef {import("./session.js").Session} Session */
/** @typedef {import("./session.js").Traced} Traced */
/** @typedef {import("../engine/matrix.js").Matrix} Matrix */

const IMPORT = "from handgrad.explain_page.views.attention import attention_head\n";

/** @param {Session} session @param {Traced} sentence @param {{ block: number, head: number }} given */
export function atHead(session, sentence, { block, head }) {
  const { n_blocks: blocks, n_heads: heads } = session.config,
    { trace } = sentence;
  if (!(block >= 0 && block < blocks && head >= 0 && head < heads))
    throw new RequestError(`there is no head ${head} in block ${block}: ${blocks} blocks of ${heads} heads, counted from 0`);
  const here = `blocks.${block}.`;
  const found = headOf(session, sentence, block, head);
  const { rho, raw, sent, signal, branches } = found;
  const [value, query, key] = branches.map(({ data }) => norm(data));
  const shown = (/** @type {string} */ name, /** @type {Matrix} */ x, python = `trace['${here}${name}'][${head}]`) => ({
    picture: picture(x, { fullRange: name === "rho" }),
    name: here + name,
    python,
  });
  const vectors = (/** @type {string} */ name, /** @type {Matrix} */ x) => ({ picture: picture(x), name: here + name, head });
  const part = `attention_head(model, trace, ${block}, ${head})`;
  const rest = (/** @type {Matrix} */ x) => range(x.rows).map((i) => x.data[i * x.cols]).slice(1);
  return {
    block,
    head,
    branches: { value, query, key },
    incoming: norm(signal.data),
    joined: norm(branches.reduce(plus).data),
    all_heads: norm(trace.get(`${here}delta_2`).data),
    heads: range(heads).map((h) => {
      const weights = trace.get(`${here}rho`, h);
      return {
        length: norm(columnsOf(trace.get(`${here}a_3`), session.config.d_head, h).data),
        incoming: norm(signalOf(session, sentence, block, h).data),
        own: sum(range(weights.rows).map((i) => weights.data[i * weights.cols + i])) / weights.rows,
        first: sum(rest(weights)) / (weights.rows - 1),
      };
    }),
    maps: {
      rho: shown("rho", rho),
      delta_raw: shown("delta_raw", raw),
      sent: shown("sent", sent, `${IMPORT}${part}.sent`),
    },
    vectors: { q: vectors("q", found.q), k: vectors("k", found.k), v: vectors("v", found.v) },
    group: [head],
    sent_caption: ABOUT_SENT,
    caption: aboutAttention(rho, sent, session.labels(sentence)),
    branches_caption: aboutBranches(value, query, key),
    branches_python: `${IMPORT}[x.norm() for x in ${part}.branches]`,
  };
}

/** The part of Δ_3 that belongs to a head. @param {Session} session @param {Traced} sentence @param {number} block
 * @param {number} head */
function signalOf({ config }, { trace }, block, head) {
  return columnsOf(trace.get(`blocks.${block}.delta_3`), config.d_head, head);
}

/** The columns of a head. @param {Matrix} x @param {number} width @param {number} head */
const columnsOf = (x, width, head) => columns(x, head * width, (head + 1) * width);

/** One head with its error signals, and what its tokens send each other: from t to s ρ_ts Δ_t w_vᵗ + Δ_raw,ts q_t w_kᵗ. Only
 * the length is needed, so the vectors themselves, (n, n, d), are never made.
 * @param {Session} session @param {Traced} sentence @param {number} block @param {number} head */
export function headOf(session, sentence, block, head) {
  const { trace } = sentence,
    of = (/** @type {string} */ name) => trace.get(`blocks.${block}.${name}`, head);
  const [q, k, v, rho, raw] = ["q", "k", "v", "rho", "delta_raw"].map(of);
  const signal = signalOf(session, sentence, block, head);
  const { w_q, w_k, w_v } = session.modelAt(sentence.version).network.blocks[block].heads[head];
  const branches = [
    linear.delta_prev(product(turned(rho), signal), w_v), // (22)
    linear.delta_prev(product(raw, k), w_q), // (30)
    linear.delta_prev(product(turned(raw), q), w_k),
  ];
  const along = (/** @type {Matrix} */ x, /** @type {Matrix} */ w, /** @type {Matrix} */ y, /** @type {Matrix} */ u) => {
    const [one, other] = [linear.delta_prev(x, w), x === y && w === u ? null : linear.delta_prev(y, u)];
    return range(x.rows).map((t) => dot(rowOf(one, t), rowOf(other ?? one, t)));
  };
  const [values, keys, both] = [along(signal, w_v, signal, w_v), along(q, w_k, q, w_k), along(q, w_k, signal, w_v)];
  const sent = matrix(rho.rows, rho.cols, rho.data.map((share, i) => {
    const [t, score] = [Math.floor(i / rho.cols), raw.data[i]];
    return Math.sqrt(Math.max(0, share ** 2 * values[t] + 2 * share * score * both[t] + score ** 2 * keys[t]));
  }));
  return { q, k, v, rho, raw, signal, branches, sent };
}

const SMALL = 16; // cells of a small picture

/** @param {Session} session @param {Traced} sentence */
export function allHeads(session, sentence) {
  const { n_blocks: blocks, n_heads: heads } = session.config,
    small = { limit: SMALL, rowsLimit: SMALL };
  let most = [0, 0, 0];
  const rows = range(blocks).map((b) =>
    range(heads).map((h) => {
      const { rho, sent, signal } = headOf(session, sentence, b, h),
        incoming = norm(signal.data);
      if (incoming >= most[0] && incoming) most = [incoming, b, h];
      return {
        rho: picture(rho, { ...small, fullRange: true }),
        sent: picture(sent, small),
        incoming,
        sent_largest: largest(sent.data),
      };
    }),
  );
  const every = `for b in range(${blocks}) for h in range(${heads})`;
  return {
    blocks: rows,
    caption: most[0]
      ? `The largest error reaches head ${most[2] + 1} of block ${most[1] + 1}: length ${typeset(most[0])}.`
      : "No error reaches any head.",
    python: {
      rho: `{(b, h): trace[f'blocks.{b}.rho'][h] ${every}}`,
      sent: `${IMPORT}{(b, h): attention_head(model, trace, b, h).sent ${every}}`,
    },
  };
}
