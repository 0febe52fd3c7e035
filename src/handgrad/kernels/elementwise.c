/* The element-wise chains of a training step, each in one pass over memory. torch calls would read and write every tensor
 * several times; on a CPU that traffic, not arithmetic, is what such a chain costs.
 *
 * Each function is the formula of the function in ops/ that calls it, and is compiled for REAL = float, for REAL = double, and
 * for float with operands of products `stored` in bfloat16. n rows of w numbers; `x` with the row stride `xs`; all strides count numbers. A row belongs to one thread
 * and is summed in one order, so a result does not depend on the number of threads.
 *
 * library.py compiles all C files of this folder. */

#include "kernels.h"

/* ── activation and gate ──────────────────────────────────────────────────────────────────────────────────────────── */

/* 0 where `exp_` would be that of the nearest end, which a huge number must not multiply */
static inline real sigmoid(real x) { return sizeof(real) == 4 && x < -88 ? 0 : 1 / (1 + exp_(-x)); }

#define SATURATED 100 /* from here on 1 − σ is 0, and infinity must not multiply it */

/* g = x σ(x),  g' = σ + g (1 − σ) */
static inline real silu(real x, real *slope) {
    real s = sigmoid(x), g = FIRST(x * s);
    *slope = s + g * (1 - s);
    return g;
}

/* GPT-2's form of GELU: g = x s,  g' = s + g (1 − s) 2u'  with  s = σ(2u),  u = √(2/π)(x + 0.044715 x³) */
static inline real gelu_tanh(real x, real *slope) {
    const real twice = (real)1.5957691216057308, cubic = (real)0.044715;
    real square = x * x;
    real s = sigmoid(twice * (x + cubic * x * square)), g = FIRST(x * s);
    *slope = square > SATURATED * SATURATED ? s : s + g * (1 - s) * twice * (1 + 3 * cubic * square);
    return g;
}

#define ACTIVATION(g)                                                                                                    \
    /* a_8 = g(a_7) */                                                                                                   \
    void hg_forward_##g(size n, size w, const stored *x, size xs, stored *out, size os) {                                \
        ROWS(n, w) for (size t = 0; t < n; t++) {                                                                        \
            const stored *restrict x_t = x + t * xs;                                                                     \
            stored *restrict out_t = out + t * os;                                                                       \
            real slope;                                                                                                  \
            for (size i = 0; i < w; i++) out_t[i] = narrow(g(wide(x_t[i]), &slope));                                     \
        }                                                                                                                \
    }                                                                                                                    \
    /* Δ_7 = Δ_8 ∘ g'(a_7), and a_8 */                                                                                   \
    void hg_backward_##g(size n, size w, const real *d, size ds, const stored *x, size xs, stored *out, size os, stored *a,\
                         size as) {                                                                                      \
        ROWS(n, w) for (size t = 0; t < n; t++) {                                                                        \
            const real *d_t = d + t * ds;                                                                                \
            const stored *x_t = x + t * xs;                                                                              \
            stored *out_t = out + t * os, *a_t = a + t * as;                                                             \
            _Pragma("omp simd") for (size i = 0; i < w; i++) {                                                           \
                real slope, d_i = d_t[i];                                                                                \
                a_t[i] = narrow(g(wide(x_t[i]), &slope));                                                                \
                out_t[i] = narrow(d_i * slope);                                                                          \
            }                                                                                                            \
        }                                                                                                                \
    }                                                                                                                    \
    /* a_8 = g(gate) ∘ up */                                                                                             \
    void hg_forward_gate_##g(size n, size w, const stored *x, size xs, const stored *u, size us, stored *out, size os) { \
        ROWS(n, w) for (size t = 0; t < n; t++) {                                                                        \
            const stored *x_t = x + t * xs, *u_t = u + t * us;                                                           \
            stored *out_t = out + t * os;                                                                                \
            _Pragma("omp simd") for (size i = 0; i < w; i++) {                                                           \
                real slope;                                                                                              \
                out_t[i] = narrow(g(wide(x_t[i]), &slope) * wide(u_t[i]));                                               \
            }                                                                                                            \
        }                                                                                                                \
    }                                                                                                                    \
    /* Δ_gate = Δ_8 ∘ up ∘ g'(gate),  Δ_up = Δ_8 ∘ g(gate),  and a_8; Δ_gate and Δ_up may overwrite gate and up */       \
    void hg_backward_gate_##g(size n, size w, const real *d, size ds, const stored *x, size xs, const stored *u, size us,\
                              stored *dx, size dxs, stored *du, size dus, stored *a, size as) {                          \
        ROWS(n, w) for (size t = 0; t < n; t++) {                                                                        \
            const real *d_t = d + t * ds;                                                                                \
            const stored *x_t = x + t * xs, *u_t = u + t * us;                                                           \
            stored *dx_t = dx + t * dxs, *du_t = du + t * dus, *a_t = a + t * as;                                        \
            _Pragma("omp simd") for (size i = 0; i < w; i++) {                                                           \
                real slope, d_i = d_t[i], u_i = wide(u_t[i]), value = g(wide(x_t[i]), &slope);                           \
                a_t[i] = narrow(value * u_i);                                                                            \
                du_t[i] = narrow(value * d_i);                                                                           \
                dx_t[i] = narrow(d_i * u_i * slope);                                                                     \
            }                                                                                                            \
        }                                                                                                                \
    }

ACTIVATION(silu)
ACTIVATION(gelu_tanh)

/* ── norms ────────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* 1/√(mean + ε) of w squares. A sum that overflowed is not a number: as infinity it would make the output 0, and nobody would see
 * it. */
static inline real inverse_root(real squares, size w, double eps) {
    return squares < (real)INFINITY ? 1 / (real)sqrt((double)squares / w + eps) : (real)NAN;
}

/* LayerNorm: a_i = ā ∘ w + b with ā = (a − μ)/σ, σ = √(var + ε); inv = 1/σ. The variance is that of a − μ. */
void hg_forward_layer(size n, size w, double eps, const real *a, size as, const real *gain, const real *b, stored *out,
                      size os, real *mu, real *inv) {
    ROWS(n, w) for (size t = 0; t < n; t++) {
        const real *restrict a_t = a + t * as;
        stored *restrict out_t = out + t * os;
        real sum = 0, squares = 0;
        for (size i = 0; i < w; i++) sum += a_t[i];
        real m = sum / w;
        for (size i = 0; i < w; i++) {
            real x = a_t[i] - m;
            squares += x * x;
        }
        real r = inverse_root(squares, w, eps);
        mu[t] = m, inv[t] = r;
        for (size i = 0; i < w; i++) out_t[i] = narrow((a_t[i] - m) * r * gain[i] + b[i]);
    }
}

/* RMSNorm: a_i = ā ∘ w with ā = a/rms; inv = 1/rms */
void hg_forward_rms(size n, size w, double eps, const real *a, size as, const real *gain, stored *out, size os, real *inv) {
    ROWS(n, w) for (size t = 0; t < n; t++) {
        const real *restrict a_t = a + t * as;
        stored *restrict out_t = out + t * os;
        real sum = 0;
        for (size i = 0; i < w; i++) sum += a_t[i] * a_t[i];
        real r = inverse_root(sum, w, eps);
        inv[t] = r;
        for (size i = 0; i < w; i++) out_t[i] = narrow(a_t[i] * r * gain[i]);
    }
}

/* From the saved statistics: ā = (a − μ)/σ and the output ā ∘ w + b; μ and b are null for RMSNorm */
void hg_rebuild_norm(size n, size w, const real *a, size as, const real *mu, const real *inv, const real *gain,
                     const real *b, real *a_bar, size bs, stored *out, size os) {
    ROWS(n, w) for (size t = 0; t < n; t++) {
        const real *restrict a_t = a + t * as;
        real *restrict bar_t = a_bar + t * bs;
        stored *restrict out_t = out + t * os;
        real r = inv[t], m = mu ? mu[t] : 0;
        for (size i = 0; i < w; i++) bar_t[i] = (a_t[i] - m) * r;
        if (b)
            for (size i = 0; i < w; i++) out_t[i] = narrow(bar_t[i] * gain[i] + b[i]);
        else
            for (size i = 0; i < w; i++) out_t[i] = narrow(bar_t[i] * gain[i]);
    }
}

/* Δ_{i−1} = 1/σ [g − mean(g) − ā ∘ mean(g ∘ ā)] with g = Δ_i ∘ w; without mean(g) unless `centered`, as for RMSNorm */
void hg_backward_norm(size n, size w, const real *d, size ds, const real *a_bar, size bs, const real *inv,
                      const real *gain, size centered, real *out, size os) {
    ROWS(n, w) for (size t = 0; t < n; t++) {
        const real *restrict d_t = d + t * ds, *restrict bar_t = a_bar + t * bs;
        real *restrict out_t = out + t * os;
        real r = inv[t], sum = 0, along = 0;
        for (size i = 0; i < w; i++) {
            real g = d_t[i] * gain[i];
            sum += g;
            along += g * bar_t[i];
        }
        sum = centered ? sum / w : 0;
        along /= w;
        for (size i = 0; i < w; i++) out_t[i] = (d_t[i] * gain[i] - sum - bar_t[i] * along) * r;
    }
}

/* Σ_t Δ ∘ ā, or Σ_t Δ if ā is null: a thread sums some columns over all rows */
void hg_column_sums(size n, size w, const real *d, size ds, const real *a_bar, size bs, real *out) {
    const size columns = 64;
    ROWS((w + columns - 1) / columns, n * columns) for (size first = 0; first < w; first += columns) {
        size count = w - first < columns ? w - first : columns;
        real sum[64] = {0};
        for (size t = 0; t < n; t++) {
            const real *restrict d_t = d + t * ds + first;
            if (a_bar) {
                const real *restrict bar_t = a_bar + t * bs + first;
                for (size i = 0; i < count; i++) sum[i] += d_t[i] * bar_t[i];
            } else
                for (size i = 0; i < count; i++) sum[i] += d_t[i];
        }
        for (size i = 0; i < count; i++) out[first + i] = sum[i];
    }
}

/* ── rotary positions ─────────────────────────────────────────────────────────────────────────────────────────────── */

/* y_i = x_i cos − x_j sin,  y_j = x_j cos + x_i sin  in every head of n tokens, `sign` = −1 for the opposite rotation.
 * Planes (i, j = i + half). y may be x. cos and sin (n, half). */
void hg_rotate(size n, size heads, size half, const real *x, size xs, size xh, const real *cosine, const real *sine,
               double sign, stored *y, size ys, size yh, size neighbors) {
    ROWS(n, heads * half) for (size t = 0; t < n; t++) {
        const real *restrict c = cosine + t * half, *restrict s = sine + t * half;
        real turn = (real)sign;
        for (size h = 0; h < heads; h++) {
            const real *x_h = x + t * xs + h * xh;
            stored *y_h = y + t * ys + h * yh;
            if (neighbors) {
                _Pragma("omp simd") for (size i = 0; i < half; i++) {
                    real u = x_h[2 * i], v = x_h[2 * i + 1], s_i = turn * s[i];
                    y_h[2 * i] = narrow(u * c[i] - v * s_i);
                    y_h[2 * i + 1] = narrow(v * c[i] + u * s_i);
                }
                continue;
            }
            _Pragma("omp simd") for (size i = 0; i < half; i++) {
                real u = x_h[i], v = x_h[i + half], s_i = turn * s[i];
                y_h[i] = narrow(u * c[i] - v * s_i);
                y_h[i + half] = narrow(v * c[i] + u * s_i);
            }
        }
    }
}

/* out[t, h] = Σ_r x[t, h·repeat + r]: the error signals of a key head from those of the query heads that share it */
void hg_sum_heads(size n, size heads, size repeat, size w, const real *x, size xs, size xh, real *out, size os, size oh) {
    ROWS(n, heads * repeat * w) for (size t = 0; t < n; t++)
        for (size h = 0; h < heads; h++) {
            const real *x_h = x + t * xs + h * repeat * xh;
            real *restrict out_h = out + t * os + h * oh;
            for (size i = 0; i < w; i++) {
                real sum = x_h[i];
                for (size r = 1; r < repeat; r++) sum += x_h[r * xh + i];
                out_h[i] = sum;
            }
        }
}

/* ── softmax with cross-entropy ───────────────────────────────────────────────────────────────────────────────────── */

/* loss(t) = log Σ exp a − a[target], and a becomes Δ = weight (y_pred − y_gt), row by row while it is in the cache. Returns 0,
 * or WRONG_TABLE if a target is not one of the w logits. */
int hg_softmax_loss(size n, size w, real *a, size as, const int64_t *target, double weight, double *loss) {
    int inside = 1;
    for (size t = 0; t < n; t++) inside &= target[t] >= 0 && target[t] < w;
    if (!inside) return WRONG_TABLE;
    ROWS(n, w) for (size t = 0; t < n; t++) {
        real *restrict a_t = a + t * as;
        real largest = a_t[0], sum = 0, of_target = a_t[target[t]];
        _Pragma("omp simd reduction(max : largest)") for (size i = 1; i < w; i++)
            largest = a_t[i] > largest ? a_t[i] : largest;
        for (size i = 0; i < w; i++) {
            a_t[i] = exp_(a_t[i] - largest);
            sum += a_t[i];
        }
        loss[t] = log((double)sum) + ((double)largest - (double)of_target);
        real factor = (real)(weight / sum);
        for (size i = 0; i < w; i++) a_t[i] *= factor;
        a_t[target[t]] -= (real)weight;
    }
    return 0;
}
