/* Products of few rows, and attention of single new tokens to cached keys: what generating a token consists of.
 *
 * Both are limited by memory: every weight, key and value is read once, in order. A row's result does not depend on the
 * rows beside it, nor on the number of threads. */

#include "common.h"

#ifdef __AVX512F__
#define BYTES 64
#else
#define BYTES 32
#endif
#define LANES ((size)(BYTES / sizeof(real)))
#define TILE 4   /* rows of the product that are computed at once */
#define OUTPUTS 8
#define KEYS 128 /* keys whose scores are computed at once */

typedef real vec __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));
typedef real half __attribute__((vector_size(BYTES / 2)));
typedef real quarter __attribute__((vector_size(BYTES / 4)));

/* the sum of the lanes */
static inline real sum_of(vec x) {
    union { vec v; half h[2]; } all = {.v = x};
    union { half h; quarter q[2]; } some = {.h = all.h[0] + all.h[1]};
    quarter few = some.q[0] + some.q[1];
    real sum = 0;
    for (size l = 0; l < LANES / 4; l++) sum += few[l];
    return sum;
}

/* out[t] = Σ_i a[t][i] w[i] for `rows` rows t, a constant. Even and odd vectors are summed apart, in the same order for any
 * number of rows. */
static inline __attribute__((always_inline)) void dot(const int rows, size f_in, const real *a, size as, const real *w,
                                                      real *out, size os) {
    vec even[TILE], odd[TILE];
    for (int t = 0; t < rows; t++) even[t] = odd[t] = (vec){0};
    size i = 0;
    for (; i + 2 * LANES <= f_in; i += 2 * LANES) {
        vec w_0 = *(const vec *)(w + i), w_1 = *(const vec *)(w + i + LANES);
        for (int t = 0; t < rows; t++) {
            even[t] += *(const vec *)(a + t * as + i) * w_0;
            odd[t] += *(const vec *)(a + t * as + i + LANES) * w_1;
        }
    }
    for (int t = 0; t < rows; t++) {
        real sum = sum_of(even[t] + odd[t]);
        for (size j = i; j < f_in; j++) sum += a[t * as + j] * w[j];
        out[t * os] = sum;
    }
}

/* a (n, f_in), w (f_out, f_in) → a wᵗ (n, f_out). Each thread reads its part of w once, from beginning to end; with more than
 * TILE rows it goes over OUTPUTS rows of w, which stay in the cache, for each group of TILE. */
void few_rows(size n, size f_in, size f_out, const real *a, size as, const real *w, size ws, real *out, size os) {
    size blocks = (f_out + OUTPUTS - 1) / OUTPUTS;
    ROWS(blocks, OUTPUTS * f_in) for (size b = 0; b < blocks; b++) {
        size first = b * OUTPUTS, end = first + OUTPUTS < f_out ? first + OUTPUTS : f_out, t = 0;
        for (; t + TILE <= n; t += TILE)
            for (size o = first; o < end; o++) dot(TILE, f_in, a + t * as, as, w + o * ws, out + t * os + o, os);
        for (; t < n; t++)
            for (size o = first; o < end; o++) dot(1, f_in, a + t * as, as, w + o * ws, out + t * os + o, os);
    }
}

/* One new token of each of n sequences: store its key and value, and attend to all keys of the sequence so far.
 * places (n, 6): addresses of the keys and of the values of block 0, numbers between two blocks of each, capacity, and the
 * position of the new token. A head's keys follow each other. q, out (n, heads, …); k, v (n, heads / share, …), with the
 * strides of rows and heads. Softmax online, in groups of KEYS. */
void attend_tokens(size n, size heads, size share, size d, size dv, size block, size window, double scale,
                   const int64_t *places, const real *q, size qs, size qh, const real *k, size ks, size kh, const real *v,
                   size vs, size vh, real *out, size os, size oh) {
    for (size t = 0; t < n; t++) {
        const int64_t *place = places + 6 * t;
        real *keys = (real *)place[0] + block * place[2], *values = (real *)place[1] + block * place[3];
        for (size g = 0; g < heads / share; g++) {
            real *key = keys + (g * place[4] + place[5]) * d, *value = values + (g * place[4] + place[5]) * dv;
            for (size i = 0; i < d; i++) key[i] = k[t * ks + g * kh + i];
            for (size i = 0; i < dv; i++) value[i] = v[t * vs + g * vh + i];
        }
    }
    size longest = 0;
    for (size t = 0; t < n; t++) longest = places[6 * t + 5] > longest ? places[6 * t + 5] : longest;
    ROWS(n * heads, longest * d) for (size item = 0; item < n * heads; item++) {
        size t = item / heads, h = item % heads, g = h / share;
        const int64_t *place = places + 6 * t;
        size end = place[5] + 1, first = window && end > window ? end - window : 0;
        const real *keys = (const real *)place[0] + block * place[2] + g * place[4] * d;
        const real *values = (const real *)place[1] + block * place[3] + g * place[4] * dv;
        const real *q_t = q + t * qs + h * qh;
        real *restrict a = out + t * os + h * oh;
        real highest = -INFINITY, total = 0, scores[KEYS];
        for (size i = 0; i < dv; i++) a[i] = 0;
        for (size start = first; start < end; start += KEYS) {
            size count = end - start < KEYS ? end - start : KEYS;
            real top = highest;
            for (size j = 0; j < count; j++) {
                const real *key = keys + (start + j) * d;
                real sum = 0;
                _Pragma("omp simd reduction(+ : sum)") for (size i = 0; i < d; i++) sum += q_t[i] * key[i];
                scores[j] = sum * (real)scale;
                top = scores[j] > top ? scores[j] : top;
            }
            real shrink = highest == -INFINITY ? 0 : exp_(highest - top);
            if (shrink != 1)
                for (size i = 0; i < dv; i++) a[i] *= shrink;
            total *= shrink;
            highest = top;
            for (size j = 0; j < count; j++) {
                scores[j] = exp_(scores[j] - top);
                total += scores[j];
            }
            for (size j = 0; j < count; j++) {
                const real *value = values + (start + j) * dv, p = scores[j];
                _Pragma("omp simd") for (size i = 0; i < dv; i++) a[i] += p * value[i];
            }
        }
        for (size i = 0; i < dv; i++) a[i] /= total;
    }
}
