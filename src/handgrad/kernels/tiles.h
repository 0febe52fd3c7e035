/* Products of small tiles in registers, and their transposition: what attention.c and products.c share. */

#include "common.h"

#define LANES ((size)(64 / sizeof(real)))
#ifdef __AVX512F__
#define HIGH 8 /* rows of a product that are computed together; with 2 vectors each they fill the registers */
#define WIDE 2
#else
#define HIGH 4
#define WIDE 1
#endif
#define ALWAYS static inline __attribute__((always_inline))

typedef real vec __attribute__((vector_size(64), aligned(sizeof(real)), may_alias));

/* HIGH rows and `wide` vectors of c (+)= a b. a[i, k] stands at a[i·ar + k·ak], rows of b and c are contiguous. */
ALWAYS void micro(size wide, size n, const real *a, size ar, size ak, const real *b, size bs, real *c, size cs, int add) {
    vec sum[HIGH][WIDE];
#pragma GCC unroll 8
    for (size i = 0; i < HIGH; i++)
#pragma GCC unroll 4
        for (size v = 0; v < wide; v++) sum[i][v] = (vec){0};
    for (size k = 0; k < n; k++) {
        vec row[WIDE];
#pragma GCC unroll 4
        for (size v = 0; v < wide; v++) row[v] = *(const vec *)(b + k * bs + v * LANES);
#pragma GCC unroll 8
        for (size i = 0; i < HIGH; i++) {
            real factor = a[i * ar + k * ak];
#pragma GCC unroll 4
            for (size v = 0; v < wide; v++) sum[i][v] += factor * row[v];
        }
    }
#pragma GCC unroll 8
    for (size i = 0; i < HIGH; i++)
#pragma GCC unroll 4
        for (size v = 0; v < wide; v++) {
            vec *out = (vec *)(c + i * cs + v * LANES);
            if (add) sum[i][v] += *out; /* last, not first: a long sum in parts rounds less */
            *out = sum[i][v];
        }
}

/* HIGH rows of c (+)= a b, w columns, a multiple of LANES */
ALWAYS void strip(size w, size n, const real *a, size ar, size ak, const real *b, size bs, real *c, size cs, int add) {
    size j = 0;
    for (; j + WIDE * LANES <= w; j += WIDE * LANES) micro(WIDE, n, a, ar, ak, b + j, bs, c + j, cs, add);
    for (; j < w; j += LANES) micro(1, n, a, ar, ak, b + j, bs, c + j, cs, add);
}

/* A square of LANES rows, transposed: rows and lanes whose number differs in one bit are exchanged, bit by bit */
ALWAYS void transpose_square(const real *x, size xs, real *out, size os) {
    typedef __typeof__(((vec){0}) == ((vec){0})) index;
    vec r[LANES];
#pragma GCC unroll 16
    for (size i = 0; i < LANES; i++) r[i] = *(const vec *)(x + i * xs);
#pragma GCC unroll 4
    for (size s = 1; s < LANES; s *= 2) {
        index low, high;
#pragma GCC unroll 16
        for (size l = 0; l < LANES; l++) {
            low[l] = l & s ? LANES + l - s : l;
            high[l] = l & s ? LANES + l : l + s;
        }
#pragma GCC unroll 16
        for (size i = 0; i < LANES; i++)
            if (!(i & s)) {
                vec a = r[i], b = r[i + s];
                r[i] = __builtin_shuffle(a, b, low), r[i + s] = __builtin_shuffle(a, b, high);
            }
    }
#pragma GCC unroll 16
    for (size i = 0; i < LANES; i++) *(vec *)(out + i * os) = r[i];
}
