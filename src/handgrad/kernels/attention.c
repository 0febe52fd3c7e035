/* Sections 3 and 4: causal self-attention, forward and backward, one sequence and one query head at a time.
 *
 *     ρ = softmax(σ q kᵗ),   a = ρ v          and       Δ_v = ρᵗ Δ,   Δ_raw = σ [Δ vᵗ − Δ ⊖ a] ∘ ρ,
 *                                                       Δ_q = Δ_raw k,   Δ_k = Δ_rawᵗ q
 *
 * σ is the scale, 1/√d_ρ unless a model has another. Scores may be capped, c tanh(σ q kᵗ/c), which multiplies Δ_raw by 1 − tanh²;
 * and a head may have a sink: a score without a key, which takes its part of ρ.
 *
 * A tile is BLOCK queries and BLOCK keys. Its scores stay in the processor's cache, ρ is rebuilt from the log-sum-exp of its
 * row, and tiles or parts of tiles that no query sees are skipped. Rows are copied into buffers padded with zeros, so that
 * every product consists of full vectors. If operands are rounded to bfloat16, so are ρ and Δ_raw for the products they are in. Whatever the number of threads, a result is summed in one order.
 * library.py compiles all C files of this folder. */

#include <string.h>

#include "kernels.h"
#include "tiles.h"

#define BLOCK 64

static size padded(size w) { return (w + PAIR * LANES - 1) / (PAIR * LANES) * (PAIR * LANES); }

/* ── copies ───────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* n rows of w numbers → BLOCK rows of `width`, the rest 0: the left operand of a product that sums over the columns */
static const operand *pack(size n, size w, const stored *x, size stride, stored *out, size width) {
    for (size t = 0; t < n; t++) {
        memcpy(out + t * width, x + t * stride, w * sizeof(stored));
        if (w < width) memset(out + t * width + w, 0, (width - w) * sizeof(stored));
    }
    memset(out + n * width, 0, (BLOCK - n) * width * sizeof(stored));
    return (const operand *)out;
}

/* BLOCK packed rows of `width` → `width` / PAIR rows of BLOCK operands: the right operand of a product that sums over the columns */
static void transpose(const stored *x, size width, operand *out) {
    const operand *rows = (const operand *)x;
    for (size j = 0; j < BLOCK; j += LANES)
        for (size i = 0; i < width / PAIR; i += LANES)
            transpose_square(rows + j * (width / PAIR) + i, width / PAIR, out + i * BLOCK + j, BLOCK);
}

#ifdef MIXED
/* BLOCK packed rows of `width` → BLOCK / 2 rows of pairs, one below the other: an operand of a product that sums over the rows */
static const operand *join_rows(const stored *x, size width, operand *out) {
    for (size t = 0; t < BLOCK; t += 2)
        for (size i = 0; i < width; i++) out[t / 2 * width + i] = x[t * width + i] | (uint32_t)x[(t + 1) * width + i] << 16;
    return out;
}

/* HIGH rows of BLOCK numbers, rounded */
static void round_rows(const real *x, stored *out) {
    for (size i = 0; i < HIGH * BLOCK; i += PAIR * LANES) _mm512_storeu_si512(out + i, pairs_along(x + i, 1, PAIR * LANES));
}

/* BLOCK rows of BLOCK numbers, rounded → rows of pairs, one below the other */
static void round_and_join(const real *x, operand *out) {
    for (size t = 0; t < BLOCK; t += PAIR)
        for (size i = 0; i < BLOCK; i += LANES) {
            const real *row = x + t * BLOCK + i;
            _mm512_storeu_si512(out + t / PAIR * BLOCK + i, pairs_across(row, row + BLOCK, 1, LANES));
        }
}
#else /* operands are the numbers themselves, where they are */
static const operand *join_rows(const stored *x, size width, operand *out) { return x; }
static void round_rows(const real *x, stored *out) {}
static void round_and_join(const real *x, operand *out) {}
#endif

/* Memory for `count` numbers of a type, from the buffer of a thread */
#define TAKE(type, count) ((type *)take(&space, ((count) * (size)sizeof(type) + (size)sizeof(real) - 1) / (size)sizeof(real)))
static real *take(real **space, size count) {
    real *taken = *space;
    *space += (count + 63) / 64 * 64;
    return taken;
}

/* ── which keys a query sees ──────────────────────────────────────────────────────────────────────────────────────── */

/* Sequences as rows of a table: first key, end of keys, first query, end of queries. */
typedef struct {
    size keys, queries;     /* of this sequence */
    const int32_t *at;      /* positions of the queries; null: query i is at position i */
    size causal, window;    /* a window of 0 is none */
} Sight;

static inline size position(const Sight *s, size i) { return s->at ? s->at[i] : i; }

/* Query i sees the keys from ≤ j < to. */
static inline void visible(const Sight *s, size i, size *from, size *to) {
    *from = 0, *to = s->keys;
    if (!s->causal) return;
    *to = position(s, i) + 1;
    if (s->window && *to > s->window) *from = *to - s->window;
}

/* The ranges of the rows of a tile, as columns of the tile; returns the largest `to`. Padded rows see nothing. */
static size ranges(const Sight *s, size i, size rows, size j, size columns, size *from, size *to) {
    size most = 0;
    for (size r = 0; r < BLOCK; r++) {
        size first = 0, last = 0;
        if (r < rows) visible(s, i + r, &first, &last);
        first -= j, last -= j;
        to[r] = last < 0 ? 0 : last > columns ? columns : last;
        from[r] = first < 0 ? 0 : first > to[r] ? to[r] : first;
        if (r >= rows) from[r] = to[r] = 0;
        most = to[r] > most ? to[r] : most;
    }
    return most;
}

/* ── forward ──────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* `cap` 0: none; `sink` null: none */
static void forward_head(const Sight *s, size wq, size wv, double scale, double cap, const real *sink, const stored *q, size qs,
                         const stored *k, size ks, const stored *v, size vs, stored *a, size as, real *lse, size ls, real *space) {
    size pq = padded(wq), pv = padded(wv), blocks = (s->keys + BLOCK - 1) / BLOCK;
    operand *kt = TAKE(operand, blocks * BLOCK * pq / PAIR), *vp = TAKE(operand, blocks * BLOCK * pv / PAIR);
    stored *qp = TAKE(stored, BLOCK * (pq > pv ? pq : pv));
    real *rho = TAKE(real, BLOCK * BLOCK), *sum = TAKE(real, BLOCK * pv), *total = TAKE(real, BLOCK), *largest = TAKE(real, BLOCK);
    stored *rounded = PAIR == 1 ? (stored *)rho : TAKE(stored, BLOCK * BLOCK);
    size from[BLOCK], to[BLOCK];
    real factor = cap > 0 ? 1 : (real)scale; /* of what is in a tile: capped scores are scaled already */
    for (size j = 0; j < s->keys; j += BLOCK) {
        size columns = s->keys - j < BLOCK ? s->keys - j : BLOCK;
        pack(columns, wq, k + j * ks, ks, qp, pq);
        transpose(qp, pq, kt + j * (pq / PAIR));
        stored *rows = PAIR == 1 ? (stored *)vp + j * pv : qp;
        pack(columns, wv, v + j * vs, vs, rows, pv);
        join_rows(rows, pv, vp + j / PAIR * pv);
    }
    for (size i = 0; i < s->queries; i += BLOCK) {
        size rows = s->queries - i < BLOCK ? s->queries - i : BLOCK, start, stop, unused;
        visible(s, i, &start, &unused);
        visible(s, i + rows - 1, &unused, &stop);
        const operand *left = pack(rows, wq, q + i * qs, qs, qp, pq);
        for (size r = 0; r < BLOCK; r++) total[r] = 0, largest[r] = -INFINITY;
        memset(sum, 0, BLOCK * pv * sizeof(real));
        for (size j = start / BLOCK * BLOCK; j < stop; j += BLOCK) {
            size columns = s->keys - j < BLOCK ? s->keys - j : BLOCK;
            ranges(s, i, rows, j, columns, from, to);
            for (size m = 0; m < rows; m += HIGH) {
                size most = 0;
                for (size r = m; r < m + HIGH; r++) most = to[r] > most ? to[r] : most;
                if (!most) continue;
                size full = (most + LANES - 1) / LANES * LANES;
                strip(full, (wq + PAIR - 1) / PAIR, left + m * (pq / PAIR), pq / PAIR, 1, kt + j * (pq / PAIR), BLOCK,
                      rho + m * BLOCK, BLOCK, 0);
                if (cap > 0)
                    for (size r = m; r < m + HIGH; r++) cap_scores(full, rho + r * BLOCK, scale, cap);
                for (size r = m; r < m + HIGH; r++) {
                    real *restrict row = rho + r * BLOCK;
                    real top = largest[r], part = 0;
                    _Pragma("omp simd reduction(max : top)") for (size c = from[r]; c < to[r]; c++)
                        top = row[c] > top ? row[c] : top;
                    for (size c = 0; c < from[r]; c++) row[c] = 0;
                    for (size c = from[r]; c < to[r]; c++) {
                        /* scaled after the difference: a large score that is scaled first is rounded, perhaps above `top` */
                        row[c] = exp_(factor * (row[c] - top));
                        part += row[c];
                    }
                    for (size c = to[r]; c < full; c++) row[c] = 0;
                    if (top > largest[r]) {
                        real shrink = exp_(factor * (largest[r] - top));
                        total[r] *= shrink;
                        for (size c = 0; c < pv; c++) sum[r * pv + c] *= shrink;
                        largest[r] = top;
                    }
                    total[r] += part;
                }
                round_rows(rho + m * BLOCK, rounded + m * BLOCK);
                strip(pv, (most + PAIR - 1) / PAIR, (const operand *)(rounded + m * BLOCK), BLOCK / PAIR, 1, vp + j / PAIR * pv, pv,
                      sum + m * pv, pv, 1);
            }
        }
        for (size r = 0; r < rows; r++) {
            real top = factor * largest[r], all = total[r], inverse = 1 / all;
            if (sink) {
                real higher = *sink > top ? *sink : top, shrink = exp_(top - higher);
                all = all * shrink + exp_(*sink - higher);
                top = higher, inverse = shrink / all;
            }
            stored *restrict a_t = a + (i + r) * as;
            for (size c = 0; c < wv; c++) a_t[c] = narrow(sum[r * pv + c] * inverse);
            lse[(i + r) * ls] = top + (real)log((double)all);
        }
    }
}

/* ── backward ─────────────────────────────────────────────────────────────────────────────────────────────────────── */

static void backward_head(const Sight *s, size wq, size wv, double scale, double cap, const stored *d, size ds, const stored *q,
                          size qs, const stored *k, size ks, const stored *v, size vs, const stored *a, size as, const real *lse, size ls,
                          real *dq, size dqs, real *dk, size dks, real *dv, size dvs, real *space) {
    size pq = padded(wq), pv = padded(wv), blocks = (s->queries + BLOCK - 1) / BLOCK;
    stored *kp = TAKE(stored, BLOCK * pq), *vp = TAKE(stored, BLOCK * pv);
    operand *kt = TAKE(operand, BLOCK * pq / PAIR), *vt = TAKE(operand, BLOCK * pv / PAIR);
    real *gk = TAKE(real, BLOCK * pq), *gv = TAKE(real, BLOCK * pv), *rho = TAKE(real, BLOCK * BLOCK), *raw = TAKE(real, BLOCK * BLOCK);
    stored *qp = TAKE(stored, blocks * BLOCK * pq), *dp = TAKE(stored, blocks * BLOCK * pv);
    real *gq = TAKE(real, blocks * BLOCK * pq), *shift = TAKE(real, blocks * BLOCK);
    /* operands of sums over rows; where an operand is a number, they are where they were */
    operand *kj = (operand *)kp, *qj = (operand *)qp, *dj = (operand *)dp, *rho_j = (operand *)rho, *raw_j = (operand *)raw;
    stored *raw_r = (stored *)raw; /* rounded */
    if (PAIR > 1) {
        kj = TAKE(operand, BLOCK * pq / PAIR);
        qj = TAKE(operand, blocks * BLOCK * pq / PAIR), dj = TAKE(operand, blocks * BLOCK * pv / PAIR);
        rho_j = TAKE(operand, BLOCK * BLOCK / PAIR), raw_j = TAKE(operand, BLOCK * BLOCK / PAIR);
        raw_r = TAKE(stored, BLOCK * BLOCK);
    }
    size from[BLOCK], to[BLOCK];
    real factor = (real)scale, inner = cap > 0 ? (real)(scale / cap) : 0, c_ = (real)cap;
    for (size i = 0; i < s->queries; i += BLOCK) {
        size rows = s->queries - i < BLOCK ? s->queries - i : BLOCK;
        pack(rows, wq, q + i * qs, qs, qp + i * pq, pq);
        pack(rows, wv, d + i * ds, ds, dp + i * pv, pv);
        join_rows(qp + i * pq, pq, qj + i / PAIR * pq);
        join_rows(dp + i * pv, pv, dj + i / PAIR * pv);
        for (size r = i; r < i + rows; r++) {
            real sum = 0; /* Δ ⊖ a */
            for (size c = 0; c < wv; c++) sum += wide(d[r * ds + c]) * wide(a[r * as + c]);
            shift[r] = sum;
        }
    }
    memset(gq, 0, blocks * BLOCK * pq * sizeof(real));
    for (size j = 0; j < s->keys; j += BLOCK) {
        size columns = s->keys - j < BLOCK ? s->keys - j : BLOCK;
        pack(columns, wv, v + j * vs, vs, vp, pv);
        transpose(vp, pv, vt);
        pack(columns, wq, k + j * ks, ks, kp, pq);
        transpose(kp, pq, kt);
        join_rows(kp, pq, kj);
        memset(gk, 0, BLOCK * pq * sizeof(real));
        memset(gv, 0, BLOCK * pv * sizeof(real));
        for (size i = 0; i < s->queries; i += BLOCK) {
            size rows = s->queries - i < BLOCK ? s->queries - i : BLOCK, first, last, unused;
            visible(s, i, &first, &unused);
            visible(s, i + rows - 1, &unused, &last);
            if (last <= j) continue;               /* these queries are before the keys */
            if (first >= j + columns) break;       /* the keys have left the window */
            size most = ranges(s, i, rows, j, columns, from, to);
            for (size m = 0; m < rows; m += HIGH) {
                size end = 0;
                for (size r = m; r < m + HIGH; r++) end = to[r] > end ? to[r] : end;
                if (end) {
                    size full = (end + LANES - 1) / LANES * LANES;
                    strip(full, (wq + PAIR - 1) / PAIR, (const operand *)(qp + (i + m) * pq), pq / PAIR, 1, kt, BLOCK, rho + m * BLOCK,
                          BLOCK, 0);
                    strip(full, (wv + PAIR - 1) / PAIR, (const operand *)(dp + (i + m) * pv), pv / PAIR, 1, vt, BLOCK, raw + m * BLOCK,
                          BLOCK, 0);
                }
                for (size r = m; r < m + HIGH; r++) {
                    real *restrict rho_t = rho + r * BLOCK, *restrict raw_t = raw + r * BLOCK;
                    real row_lse = r < rows ? lse[(i + r) * ls] : 0, row_shift = r < rows ? shift[i + r] : 0;
                    for (size c = 0; c < from[r]; c++) rho_t[c] = raw_t[c] = 0;
                    if (cap > 0)
                        for (size c = from[r]; c < to[r]; c++) {
                            real t = tanh_of_score(inner * rho_t[c]);
                            rho_t[c] = exp_(c_ * t - row_lse);
                            raw_t[c] = (raw_t[c] - row_shift) * (rho_t[c] * factor) * (1 - t * t);
                        }
                    else
                        for (size c = from[r]; c < to[r]; c++) {
                            rho_t[c] = exp_(factor * rho_t[c] - row_lse);
                            raw_t[c] = (raw_t[c] - row_shift) * (rho_t[c] * factor);
                        }
                    for (size c = to[r]; c < BLOCK; c++) rho_t[c] = raw_t[c] = 0;
                }
                round_rows(raw + m * BLOCK, raw_r + m * BLOCK);
                if (end)
                    strip(pq, (end + PAIR - 1) / PAIR, (const operand *)(raw_r + m * BLOCK), BLOCK / PAIR, 1, kj, pq, gq + (i + m) * pq,
                          pq, 1);
            }
            round_and_join(rho, rho_j);
            round_and_join(raw, raw_j);
            size begin = 0, pairs = (rows + PAIR - 1) / PAIR;
            for (size m = 0; m < most; m += HIGH) {
                while (begin < rows && to[begin] <= m) begin++; /* the first query that sees one of these keys */
                size b = begin / PAIR;
                strip(pv, pairs - b, rho_j + b * BLOCK + m, 1, BLOCK, dj + (i / PAIR + b) * pv, pv, gv + m * pv, pv, 1);
                strip(pq, pairs - b, raw_j + b * BLOCK + m, 1, BLOCK, qj + (i / PAIR + b) * pq, pq, gk + m * pq, pq, 1);
            }
        }
        for (size c = 0; c < columns; c++) {
            memcpy(dk + (j + c) * dks, gk + c * pq, wq * sizeof(real));
            memcpy(dv + (j + c) * dvs, gv + c * pv, wv * sizeof(real));
        }
    }
    for (size i = 0; i < s->queries; i++) memcpy(dq + i * dqs, gq + i * pq, wq * sizeof(real));
}

/* ── all sequences and heads ──────────────────────────────────────────────────────────────────────────────────────── */

/* The most keys or queries of a sequence, rounded up to blocks; −1 if a sequence has rows outside of the tensors or before the
 * end of the one before it, or a query at a position without a key, or before the query above it. A wrong table would be read
 * as addresses, so every call looks at it: a few instructions for a row of queries. */
static size longest_of(size sequences, const int64_t *table, const int32_t *at, size n_keys, size n_queries, size causal) {
    size longest = 0, key = 0, query = 0;
    for (const int64_t *row = table; row < table + 4 * sequences; row += 4) {
        size keys = row[1] - row[0], queries = row[3] - row[2], before = 0, ordered = 1;
        if (row[0] < key || keys < (queries > 0) || row[1] > n_keys) return -1;
        if (row[2] < query || queries < 0 || row[3] > n_queries) return -1;
        key = row[1], query = row[3];
        if (causal && !at && queries > keys) return -1;
        if (causal && at)
            for (size i = row[2]; i < row[3]; i++) {
                ordered &= at[i] >= before && at[i] < keys;
                before = at[i];
            }
        if (!ordered) return -1;
        longest = keys > longest ? keys : longest;
        longest = queries > longest ? queries : longest;
    }
    return (longest + BLOCK - 1) / BLOCK * BLOCK;
}

/* `table` (sequences, 4): first and end of the keys, first and end of the queries; `at` (n_queries): positions of the queries
 * by their row, or null. `repeat` query heads share a key head. Returns 0, NO_MEMORY or WRONG_TABLE. */
#define EACH_HEAD(numbers, body)                                                                                         \
    int failed = 0;                                                                                                      \
    size rounded = longest_of(sequences, table, at, n_keys, n_queries, causal), pq = padded(wq), pv = padded(wv);        \
    if (rounded < 0) return WRONG_TABLE;                                                                                 \
    _Pragma("omp parallel") {                                                                                            \
        real *space = new_buffer((numbers) + 20 * 64);                                                                               \
        if (!space) { _Pragma("omp atomic write") failed = NO_MEMORY; }                                                  \
        _Pragma("omp for schedule(dynamic)") for (size item = 0; item < sequences * heads; item++) {                     \
            const int64_t *row = table + item / heads * 4;                                                               \
            size h = item % heads, g = h / repeat, k0 = row[0], q0 = row[2];                                             \
            Sight sight = {row[1] - k0, row[3] - q0, at ? at + q0 : NULL, causal, window};                               \
            if (space) body                                                                                              \
        }                                                                                                                \
        free(space);                                                                                                     \
    }                                                                                                                    \
    return failed

int hg_forward_attention(size sequences, const int64_t *table, const int32_t *at, size n_keys, size n_queries, size heads,
                         size repeat, size wq, size wv, double scale, double cap, size causal, size window, const real *sinks,
                         const stored *q, size qs, size qh, const stored *k, size ks, size kh, const stored *v, size vs, size vh, stored *a, size as,
                         size ah, real *lse, size ls, size lh) {
    EACH_HEAD(rounded * (pq + pv) + BLOCK * (pq + 2 * BLOCK + 2 * pv + 2),
              forward_head(&sight, wq, wv, scale, cap, sinks ? sinks + h : NULL, q + q0 * qs + h * qh, qs, k + k0 * ks + g * kh, ks, v + k0 * vs + g * vh,
                           vs, a + q0 * as + h * ah, as, lse + q0 * ls + h * lh, ls, space););
}

/* dk and dv have a head for each query head */
int hg_backward_attention(size sequences, const int64_t *table, const int32_t *at, size n_keys, size n_queries,
                          size heads, size repeat, size wq, size wv, double scale, double cap, size causal, size window,
                          const stored *d, size ds, size dh, const stored *q, size qs, size qh, const stored *k,
                          size ks, size kh, const stored *v, size vs, size vh, const stored *a, size as, size ah, const real *lse,
                          size ls, size lh, real *dq, size dqs, size dqh, real *dk, size dks, size dkh, real *dv,
                          size dvs, size dvh) {
    EACH_HEAD(BLOCK * (3 * pq + 3 * pv + 4 * BLOCK) + rounded * (2 * pq + pv + 1),
              backward_head(&sight, wq, wv, scale, cap, d + q0 * ds + h * dh, ds, q + q0 * qs + h * qh, qs, k + k0 * ks + g * kh,
                            ks, v + k0 * vs + g * vh, vs, a + q0 * as + h * ah, as, lse + q0 * ls + h * lh, ls,
                            dq + q0 * dqs + h * dqh, dqs, dk + k0 * dks + h * dkh, dks, dv + k0 * dvs + h * dvh, dvs,
                            space););
}
