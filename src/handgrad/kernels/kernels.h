/* The functions of this library. signatures.py declares the same to Python. n rows of w numbers; a tensor is an address with its
 * strides, counted in numbers. Those that return a number return 0, NO_MEMORY or WRONG_TABLE. */

#pragma once

#include "common.h"

/* ── elementwise.c ─────────────────────────────────────────────────────────────────────────────────────────────────── */

#define OF_ACTIVATION(g)                                                                                                 \
    KERNEL void hg_forward_##g(size n, size w, const stored *x, size xs, stored *out, size os);                          \
    KERNEL void hg_backward_##g(size n, size w, const real *d, size ds, const stored *x, size xs, stored *out, size os,  \
                                stored *a, size as);                                                                     \
    KERNEL void hg_forward_gate_##g(size n, size w, const stored *x, size xs, const stored *u, size us, stored *out,     \
                                    size os);                                                                            \
    KERNEL void hg_backward_gate_##g(size n, size w, const real *d, size ds, const stored *x, size xs, const stored *u,  \
                                     size us, stored *dx, size dxs, stored *du, size dus, stored *a, size as);
OF_ACTIVATION(silu)
OF_ACTIVATION(gelu_tanh)
KERNEL void hg_forward_layer(size n, size w, double eps, const real *a, size as, const real *gain, const real *b,
                             stored *out, size os, real *mu, real *inv);
KERNEL void hg_forward_rms(size n, size w, double eps, const real *a, size as, const real *gain, stored *out, size os,
                           real *inv);
KERNEL void hg_rebuild_norm(size n, size w, const real *a, size as, const real *mu, const real *inv, const real *gain,
                            const real *b, real *a_bar, size bs, stored *out, size os);
KERNEL void hg_backward_norm(size n, size w, const real *d, size ds, const real *a_bar, size bs, const real *inv,
                             const real *gain, size centered, real *out, size os);
KERNEL void hg_column_sums(size n, size w, const real *d, size ds, const real *a_bar, size bs, real *out);
KERNEL void hg_rotate(size n, size heads, size half, const real *x, size xs, size xh, const real *cosine,
                      const real *sine, double sign, stored *y, size ys, size yh, size neighbors);
KERNEL void hg_sum_heads(size n, size heads, size repeat, size w, const real *x, size xs, size xh, real *out, size os,
                         size oh);
KERNEL int hg_softmax_loss(size n, size w, real *a, size as, const int64_t *target, double weight, double *loss);

/* ── attention.c ───────────────────────────────────────────────────────────────────────────────────────────────────── */

KERNEL int hg_forward_attention(size sequences, const int64_t *table, const int32_t *at, size n_keys, size n_queries,
                                size heads, size repeat, size wq, size wv, double scale, double cap, size causal,
                                size window, const real *sinks, const stored *q, size qs, size qh, const stored *k, size ks, size kh, const stored *v,
                                size vs, size vh, stored *a, size as, size ah, real *lse, size ls, size lh);
KERNEL int hg_backward_attention(size sequences, const int64_t *table, const int32_t *at, size n_keys, size n_queries,
                                 size heads, size repeat, size wq, size wv, double scale, double cap, size causal,
                                 size window,
                                 const stored *d, size ds, size dh, const stored *q, size qs, size qh, const stored *k,
                                 size ks, size kh, const stored *v, size vs, size vh, const stored *a, size as, size ah,
                                 const real *lse, size ls, size lh, real *dq, size dqs, size dqh, real *dk, size dks,
                                 size dkh, real *dv, size dvs, size dvh);

/* ── products.c ────────────────────────────────────────────────────────────────────────────────────────────────────── */

KERNEL int hg_product(size m, size w, size n, const real *a, size ar, size ak, const real *b, size bk, size bj,
                      const real *bias, real *c, size cs, size add);

/* ── mixed.c, which only the library with operands in bfloat16 has, and that library no product ─────────────────────── */

KERNEL int hg_mixed_product(size m, size w, size n, const void *a, size a_floats, size ar, size ak, const void *b,
                            size b_floats, size bk, size bj, size r, const void *h, size h_floats, size hr, size hk,
                            const void *v, size v_floats, size vk, size vj, const float *bias, void *c, size c_floats,
                            size cs, size add);

/* ── packed.c ──────────────────────────────────────────────────────────────────────────────────────────────────────── */

KERNEL void hg_packed_product(size kind, size n, size f_in, size f_out, const float *a, size as, const uint8_t *w,
                              float *out, size os);
KERNEL void hg_packed_unpack(size kind, size blocks, const uint8_t *w, void *out, size as_floats);

/* ── rounded.c ─────────────────────────────────────────────────────────────────────────────────────────────────────── */

KERNEL int hg_rounded_product(size kind, size n, size f_in, size f_out, const float *a, size as, const uint8_t *w,
                              float *out, size os);

/* ── decode.c ──────────────────────────────────────────────────────────────────────────────────────────────────────── */

KERNEL int hg_few_rows(size n, size f_in, size f_out, const real *a, size as, const real *w, size ws, real *out,
                       size os);
KERNEL void hg_few_rows_in_out(size n, size f_in, size f_out, const real *a, size as, const real *w, size ws, real *out,
                               size os);
KERNEL int hg_attend_tokens(size n, size count, size share, size d, size dv, size block, size window, double scale,
                            double cap, const real *sinks, const int64_t *places, const real *q, size qs, size qh, const real *k, size ks, size kh,
                            const real *v, size vs, size vh, real *out, size os, size oh);

/* ── token_block.c ─────────────────────────────────────────────────────────────────────────────────────────────────── */

/* Orientation of a matrix; other kinds are packed (packed.c), and from ROUNDED on multiplied with rounded activations (rounded.c). */
enum { IN_OUT = -2, OUT_IN = -1, ROUNDED = 16 };
enum { SILU, GELU_TANH };

/* A matrix with the addresses of its numbers, of its bias and of an adapter's factors; 0: none */
typedef struct { int64_t kind, f_in, f_out, w, ws, b, rank, down, up; double scale; } matrix;
typedef struct { int64_t w, b; double eps; } norm; /* b = 0: RMSNorm; w = 0: no norm */
typedef struct {
    int64_t index, d, heads, share, d_rho, d_h, hidden, window, rotated, activation, gated, inputs, mlp_inputs;
    double scale, cap; /* of scores; a cap of 0 is none */
    int64_t sinks;     /* address of a score for every head; 0: none */
    norm norm_1, norm_5, q_norm, k_norm;
    matrix qkv[3], out, mlp[2], contract;
} block;

KERNEL int hg_token_blocks(size count, const block *blocks, size n, const int64_t *places, const real *cosine,
                           const real *sine, real *a);
