/* All blocks of the network for single new tokens of n sequences, in one call and one parallel region. A token passes some
 * hundred small steps: calling each of them from Python, or waking the threads for it, would take longer than the step. The
 * formulas are those of the functions called here, in the order of model/block.py. */

#include <string.h>

#include "decode.h"
#include "kernels.h"

/* Where a token's tensors lie. `widest` is the widest input of a product, `rank` the highest of an adapter. */
typedef struct { real *a_2, *q, *a_3, *a_7, *a_8, *turned, *low, *up, *statistics, *heads; group *rounded; } buffers;

#define BARRIER PRAGMA(omp barrier)
#define ONE_THREAD PRAGMA(omp single) /* the others wait */

/* out = a w */
static void product_part(const matrix *m, size n, const real *a, size as, const buffers *x, real *out, size os) {
    size f_in = m->f_in, f_out = m->f_out;
    const uint8_t *w = (const uint8_t *)m->w;
    if (m->kind == OUT_IN) few_rows_part(n, f_in, f_out, a, as, x->turned, (const real *)w, m->ws, out, os);
    else if (m->kind == IN_OUT) few_rows_in_out_part(n, f_in, f_out, a, as, (const real *)w, m->ws, out, os);
    else if (m->kind < ROUNDED) packed_product_part(m->kind, n, f_in, f_out, (const float *)a, as, w, (float *)out, os);
    else rounded_product_part(m->kind - ROUNDED, n, f_in, f_out, x->rounded, w, (float *)out, os);
}

/* out = a w + b~ + scale · a d u of `count` layers with the same input, side by side */
static void linear_part(const matrix *m, int count, size n, const real *a, size as, real *out, size os, const buffers *x) {
    int turn = 0, round = 0;
    for (int i = 0; i < count; i++) turn |= 2 * n > MANY && m[i].kind == OUT_IN, round |= m[i].kind >= ROUNDED;
    if (turn) turn_part(n, m->f_in, a, as, x->turned);
    if (round) round_part(n, m->f_in, (const float *)a, as, x->rounded);
    if (turn || round) {
        BARRIER
    }
    real *to = out, *low = x->low;
    for (int i = 0; i < count; to += m[i].f_out, low += n * m[i].rank, i++) {
        product_part(m + i, n, a, as, x, to, os);
        if (m[i].rank) few_rows_in_out_part(n, m[i].f_in, m[i].rank, a, as, (const real *)m[i].down, m[i].rank, low, m[i].rank);
    }
    BARRIER
    to = out, low = x->low;
    for (int i = 0; i < count; to += m[i].f_out, low += n * m[i].rank, i++) {
        if (m[i].rank) {
            size r = m[i].rank, f_out = m[i].f_out;
            few_rows_in_out_part(n, r, f_out, low, r, (const real *)m[i].up, f_out, x->up, f_out);
            BARRIER
        }
        if (m[i].rank || m[i].b) {
            const real *b = (const real *)m[i].b;
            ONE_THREAD for (size t = 0; t < n; t++)
                for (size o = 0; o < m[i].f_out; o++)
                    to[t * os + o] += (b ? b[o] : 0) + (m[i].rank ? (real)m[i].scale * x->up[t * m[i].f_out + o] : 0);
        }
    }
}

/* rows of w numbers */
static void normalize(const norm *x, size n, size w, const real *a, size as, real *out, size os, real *statistics) {
    const real *gain = (const real *)x->w, *b = (const real *)x->b;
    if (b) hg_forward_layer(n, w, x->eps, a, as, gain, b, out, os, statistics, statistics + n);
    else hg_forward_rms(n, w, x->eps, a, as, gain, out, os, statistics);
}

/* a += b */
static void add(size count, real *restrict a, const real *restrict b) {
    for (size i = 0; i < count; i++) a[i] += b[i];
}

/* By all threads. a (n, d): a_1, which becomes a_10 */
static void token_block_part(const block *x, size n, const int64_t *places, const real *cosine, const real *sine, real *a,
                             const buffers *to) {
    size d = x->d, kv = x->heads / x->share, q_width = x->heads * x->d_rho, k_width = kv * x->d_rho;
    size width = q_width + k_width + kv * x->d_h, a_3_width = x->heads * x->d_h;
    size hidden = x->hidden, a_7_width = hidden * (x->gated ? 2 : 1);
    real *a_2 = to->a_2, *q = to->q, *k = q + q_width, *v = k + k_width, *a_3 = to->a_3, *a_7 = to->a_7, *a_8 = to->a_8;
    const heads h = {x->heads, x->share, x->d_rho, x->d_h, x->window, x->scale, x->cap, (const real *)x->sinks};

    ONE_THREAD normalize(&x->norm_1, n, d, a, d, a_2, d, to->statistics);
    linear_part(x->qkv, (int)x->inputs, n, a_2, d, q, width, to);
    ONE_THREAD {
        for (size t = 0; t < n && x->q_norm.w; t++) {
            real *q_t = q + t * width, *k_t = k + t * width;
            memcpy(to->heads, q_t, (q_width + k_width) * sizeof(real));
            normalize(&x->q_norm, x->heads, x->d_rho, to->heads, x->d_rho, q_t, x->d_rho, to->statistics);
            normalize(&x->k_norm, kv, x->d_rho, to->heads + q_width, x->d_rho, k_t, x->d_rho, to->statistics);
        }
        if (x->rotated) {
            hg_rotate(n, x->heads, x->d_rho / 2, q, width, x->d_rho, cosine, sine, 1, q, width, x->d_rho, 0);
            hg_rotate(n, kv, x->d_rho / 2, k, width, x->d_rho, cosine, sine, 1, k, width, x->d_rho, 0);
        }
        store_tokens(&h, n, x->index, places, k, width, x->d_rho, v, width, x->d_h);
    }
    attend_tokens_part(&h, n, x->index, places, q, width, x->d_rho, a_3, a_3_width, x->d_h);
    BARRIER
    linear_part(&x->out, 1, n, a_3, a_3_width, a_2, d, to);
    ONE_THREAD {
        add(n * d, a, a_2); /* a_5 */
        normalize(&x->norm_5, n, d, a, d, a_2, d, to->statistics);
    }
    linear_part(x->mlp, (int)x->mlp_inputs, n, a_2, d, a_7, a_7_width, to);
    ONE_THREAD {
        if (x->gated && x->activation == SILU)
            hg_forward_gate_silu(n, hidden, a_7, a_7_width, a_7 + hidden, a_7_width, a_8, hidden);
        else if (x->gated) hg_forward_gate_gelu_tanh(n, hidden, a_7, a_7_width, a_7 + hidden, a_7_width, a_8, hidden);
        else if (x->activation == SILU) hg_forward_silu(n, hidden, a_7, a_7_width, a_8, hidden);
        else hg_forward_gelu_tanh(n, hidden, a_7, a_7_width, a_8, hidden);
    }
    linear_part(&x->contract, 1, n, a_8, hidden, a_2, d, to);
    ONE_THREAD add(n * d, a, a_2); /* a_10 */
}

static size larger(size a, size b) { return a > b ? a : b; }

/* The first of `count` numbers, aligned, and everything after them */
static real *take(real **memory, size count) {
    real *x = *memory;
    *memory += (count + 15) / 16 * 16;
    return x;
}

/* a (n, d) contiguous: a_1 of the first block, which becomes a_10 of the last. places: see decode.h. cos and sin (n, d_rho/2).
 * All blocks have equal widths; the ranks of adapters may differ. Returns 0, NO_MEMORY or WRONG_TABLE. */
int hg_token_blocks(size count, const block *blocks, size n, const int64_t *places, const real *cosine, const real *sine,
                    real *a) {
    if (wrong_places(n, places)) return WRONG_TABLE;
    const block *x = blocks;
    size kv = x->heads / x->share, heads = (x->heads + kv) * x->d_rho + kv * x->d_h, rank = 0;
    size widest = larger(larger(x->d, x->heads * x->d_h), larger(heads, 2 * x->hidden));
    for (size i = 0; i < count; i++) {
        const matrix *all[] = {x[i].qkv, x[i].qkv + 1, x[i].qkv + 2, &x[i].out, x[i].mlp, x[i].mlp + 1, &x[i].contract};
        for (int j = 0; j < 7; j++) rank = larger(rank, all[j]->rank);
        if (x[i].activation != SILU && x[i].activation != GELU_TANH) return WRONG_TABLE;
    }
    size numbers = n * (x->d + heads + x->heads * x->d_h + 3 * x->hidden + widest + 3 * rank) + MANY * widest;
    numbers += heads + 2 * larger(n, x->heads) + rounded_size(n, widest) + 11 * 16;
    real *memory = new_buffer(numbers), *rest = memory;
    if (!memory) return NO_MEMORY;
    buffers to = {.a_2 = take(&rest, n * x->d)};
    to.q = take(&rest, n * heads);
    to.a_3 = take(&rest, n * x->heads * x->d_h);
    to.a_7 = take(&rest, n * 2 * x->hidden);
    to.a_8 = take(&rest, n * x->hidden);
    to.turned = take(&rest, MANY * widest);
    to.low = take(&rest, 3 * n * rank);
    to.up = take(&rest, n * widest);
    to.statistics = take(&rest, 2 * larger(n, x->heads));
    to.heads = take(&rest, heads);
    to.rounded = (group *)take(&rest, rounded_size(n, widest));
    PRAGMA(omp parallel)
    for (size i = 0; i < count; i++) token_block_part(blocks + i, n, places, cosine, sine, a, &to);
    free(memory);
    return 0;
}
