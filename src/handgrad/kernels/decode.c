/* Products of few rows, and attention of single new tokens to cached keys: what generating a token consists of.
 *
 * Both are limited by memory: every weight, key and value is read once, in order. A row's result does not depend on the
 * rows beside it, nor on the number of threads. */

#include "decode.h"
#include "kernels.h"

#if defined(__AVX512F__)
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define LANES ((size)(BYTES / sizeof(real)))
#define TILE 4    /* rows, and outputs or vectors of outputs, that are computed at once */
#define OUTPUTS 8 /* that are computed at once for many rows */
#define STRIP 8   /* vectors of outputs whose columns are read at once */
#define AHEAD 8   /* rows of w that are requested before they are needed */
#define KEYS 128  /* keys whose scores are computed at once */

typedef real vec __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));

/* the sum of the lanes */
static inline real sum_of(vec x) {
    IN_ORDER
    real sum = 0;
#if BYTES > 16 /* quarters first */
    typedef real half __attribute__((vector_size(BYTES / 2)));
    typedef real quarter __attribute__((vector_size(BYTES / 4)));
    union { vec v; half h[2]; } all = {.v = x};
    union { half h; quarter q[2]; } some = {.h = all.h[0] + all.h[1]};
    quarter few = some.q[0] + some.q[1];
    for (size l = 0; l < LANES / 4; l++) sum += few[l];
#else
    for (size l = 0; l < LANES; l++) sum += x[l];
#endif
    return sum;
}

/* out[t] = Σ_i a[t][i] w[i] for `rows` rows t, a constant. A sum has one order, whatever the number of rows. */
static inline __attribute__((always_inline)) void dot(const int rows, size f_in, const real *a, size as, const real *w,
                                                      real *out, size os) {
    IN_ORDER
    vec sum[TILE];
    for (int t = 0; t < rows; t++) sum[t] = (vec){0};
    size i = 0;
    for (; i + LANES <= f_in; i += LANES) {
        vec w_i = *(const vec *)(w + i);
        for (int t = 0; t < rows; t++) sum[t] += *(const vec *)(a + t * as + i) * w_i;
    }
    for (int t = 0; t < rows; t++) {
        real total = sum_of(sum[t]);
        for (size j = i; j < f_in; j++) total += a[t * as + j] * w[j];
        out[t * os] = total;
    }
}

/* outputs `first` to `end`, of up to MANY / 2 rows. The weights are read from beginning to end: in this order memory delivers
 * them fastest. */
static void some_outputs(size first, size end, size n, size f_in, const real *a, size as, const real *w, size ws, real *out,
                         size os) {
    for (size o = first; o < end; o++) {
        size t = 0;
        for (; t + TILE <= n; t += TILE) dot(TILE, f_in, a + t * as, as, w + o * ws, out + t * os + o, os);
        for (; t < n; t++) dot(1, f_in, a + t * as, as, w + o * ws, out + t * os + o, os);
    }
}

/* The same of more rows: a lane for each row, so that no sum over lanes is needed. `turned` is aᵗ (f_in, MANY). */
static void many_rows(size first, size end, size n, size f_in, const real *turned, const real *w, size ws, real *out, size os) {
    for (; first < end; first += OUTPUTS) {
        union { vec v[OUTPUTS][MANY / LANES]; real x[OUTPUTS][MANY]; } sum = {0};
        size count = end - first < OUTPUTS ? end - first : OUTPUTS;
        const real *w_b = w + first * ws;
        if (count == OUTPUTS) {
            vec total[OUTPUTS][MANY / LANES] = {0};
            for (size i = 0; i < f_in; i++)
                for (int v = 0; v < MANY / LANES; v++) {
                    vec a_i = *(const vec *)(turned + i * MANY + v * LANES);
                    for (int o = 0; o < OUTPUTS; o++) total[o][v] += w_b[o * ws + i] * a_i;
                }
            for (int o = 0; o < OUTPUTS; o++)
                for (int v = 0; v < MANY / LANES; v++) sum.v[o][v] = total[o][v];
        } else {
            for (size o = 0; o < count; o++)
                for (size i = 0; i < f_in; i++)
                    for (int v = 0; v < MANY / LANES; v++)
                        sum.v[o][v] += w_b[o * ws + i] * *(const vec *)(turned + i * MANY + v * LANES);
        }
        for (size t = 0; t < n; t++)
            for (size o = 0; o < count; o++) out[t * os + first + o] = sum.x[o][t];
    }
}

void turn_part(size n, size f_in, const real *a, size as, real *turned) {
    size first, end;
    share_of(f_in, OUTPUTS, &first, &end);
    for (size i = first; i < end; i++)
        for (size t = 0; t < MANY; t++) turned[i * MANY + t] = t < n ? a[t * as + i] : 0;
}

void few_rows_part(size n, size f_in, size f_out, const real *a, size as, const real *turned, const real *w, size ws, real *out,
                   size os) {
    size first, end;
    share_of(f_out, OUTPUTS, &first, &end);
    if (2 * n <= MANY) some_outputs(first, end, n, f_in, a, as, w, ws, out, os);
    else many_rows(first, end, n, f_in, turned, w, ws, out, os);
}

int hg_few_rows(size n, size f_in, size f_out, const real *a, size as, const real *w, size ws, real *out, size os) {
    real *turned = 2 * n > MANY ? new_buffer(f_in * MANY) : NULL;
    if (2 * n > MANY && !turned) return NO_MEMORY;
    PRAGMA(omp parallel if (f_in * f_out >= PARALLEL_FROM)) {
        if (turned) turn_part(n, f_in, a, as, turned);
        PRAGMA(omp barrier)
        few_rows_part(n, f_in, f_out, a, as, turned, w, ws, out, os);
    }
    free(turned);
    return 0;
}

/* out[t][o] = Σ_i a[t][i] w[i][o] for `rows` rows and `vectors` vectors of outputs, both constant */
static inline __attribute__((always_inline)) void columns(const int rows, const int vectors, size f_in, const real *a, size as,
                                                          const real *w, size ws, real *out, size os) {
    vec sum[TILE][STRIP];
    for (int t = 0; t < rows; t++)
        for (int v = 0; v < vectors; v++) sum[t][v] = (vec){0};
    for (size i = 0; i < f_in; i++) {
        const real *w_i = w + i * ws;
        for (int v = 0; v < vectors; v++) __builtin_prefetch(w_i + AHEAD * ws + v * LANES);
        for (int t = 0; t < rows; t++)
            for (int v = 0; v < vectors; v++) sum[t][v] += a[t * as + i] * *(const vec *)(w_i + v * LANES);
    }
    for (int t = 0; t < rows; t++)
        for (int v = 0; v < vectors; v++) *(vec *)(out + t * os + v * LANES) = sum[t][v];
}

void few_rows_in_out_part(size n, size f_in, size f_out, const real *a, size as, const real *w, size ws, real *out, size os) {
    size first, end;
    share_of(f_out, STRIP * LANES, &first, &end);
    for (size stop; first < end; first = stop) {
        size t = 0, o;
        stop = first + STRIP * LANES < end ? first + STRIP * LANES : end;
#define SOME(rows, vectors)                                                                                              \
    for (; o + vectors * LANES <= stop; o += vectors * LANES)                                                            \
        columns(rows, vectors, f_in, a + t * as, as, w + o, ws, out + t * os + o, os);
#define REST(rows)                                                                                                       \
    for (; o < stop; o++)                                                                                                \
        for (size r = t; r < t + rows; r++) {                                                                            \
            real sum = 0;                                                                                                \
            for (size i = 0; i < f_in; i++) sum += a[r * as + i] * w[i * ws + o];                                        \
            out[r * os + o] = sum;                                                                                       \
        }
        for (; t + TILE <= n; t += TILE) {
            o = first;
            SOME(TILE, TILE) SOME(TILE, 1) REST(TILE)
        }
        for (; t < n; t++) {
            o = first;
            SOME(1, STRIP) SOME(1, 1) REST(1)
        }
    }
}

void hg_few_rows_in_out(size n, size f_in, size f_out, const real *a, size as, const real *w, size ws, real *out,
                        size os) {
    PRAGMA(omp parallel if (f_in * f_out >= PARALLEL_FROM))
    few_rows_in_out_part(n, f_in, f_out, a, as, w, ws, out, os);
}

void attend_tokens_part(const heads *x, size n, size block, const int64_t *places, const real *q, size qs, size qh, real *out,
                        size os, size oh) {
    size item, last, d = x->d, dv = x->dv;
    share_of(n * x->heads, 1, &item, &last);
    for (; item < last; item++) {
        size t = item / x->heads, h = item % x->heads, g = h / x->share;
        const int64_t *place = places + 6 * t;
        size end = place[5] + 1, first = x->window && end > x->window ? end - x->window : 0;
        const real *keys = (const real *)place[0] + block * place[2] + g * place[4] * d;
        const real *values = (const real *)place[1] + block * place[3] + g * place[4] * dv;
        const real *q_t = q + t * qs + h * qh;
        real *restrict a = out + t * os + h * oh;
        real highest = x->sinks ? x->sinks[h] : -INFINITY, total = highest > -INFINITY, scores[KEYS];
        for (size i = 0; i < dv; i++) a[i] = 0;
        for (size start = first; start < end; start += KEYS) {
            size count = end - start < KEYS ? end - start : KEYS;
            real top = highest;
            for (size j = 0; j < count; j++) {
                const real *key = keys + (start + j) * d;
                real sum = 0;
                _Pragma("omp simd reduction(+ : sum)") for (size i = 0; i < d; i++) sum += q_t[i] * key[i];
                scores[j] = sum;
            }
            if (x->cap > 0) cap_scores(count, scores, x->scale, x->cap);
            else
                for (size j = 0; j < count; j++) scores[j] *= (real)x->scale;
            for (size j = 0; j < count; j++) top = scores[j] > top ? scores[j] : top;
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

int wrong_places(size n, const int64_t *places) {
    int wrong = 0;
    for (const int64_t *place = places; place < places + 6 * n; place += 6) wrong |= place[5] < 0 || place[5] >= place[4];
    return wrong;
}

void store_tokens(const heads *x, size n, size block, const int64_t *places, const real *k, size ks, size kh, const real *v,
                  size vs, size vh) {
    for (size t = 0; t < n; t++) {
        const int64_t *place = places + 6 * t;
        real *keys = (real *)place[0] + block * place[2], *values = (real *)place[1] + block * place[3];
        for (size g = 0; g < x->heads / x->share; g++) {
            real *key = keys + (g * place[4] + place[5]) * x->d, *value = values + (g * place[4] + place[5]) * x->dv;
            for (size i = 0; i < x->d; i++) key[i] = k[t * ks + g * kh + i];
            for (size i = 0; i < x->dv; i++) value[i] = v[t * vs + g * vh + i];
        }
    }
}

int hg_attend_tokens(size n, size count, size share, size d, size dv, size block, size window, double scale,
                     double cap, const real *sinks, const int64_t *places, const real *q, size qs, size qh, const real *k, size ks, size kh,
                     const real *v, size vs, size vh, real *out, size os, size oh) {
    if (wrong_places(n, places)) return WRONG_TABLE;
    heads x = {count, share, d, dv, window, scale, cap, sinks};
    store_tokens(&x, n, block, places, k, ks, kh, v, vs, vh);
    size longest = 0;
    for (size t = 0; t < n; t++) longest = places[6 * t + 5] > longest ? places[6 * t + 5] : longest;
    PRAGMA(omp parallel if (n * count * longest * d >= PARALLEL_FROM))
    attend_tokens_part(&x, n, block, places, q, qs, qh, out, os, oh);
    return 0;
}
