/* Products of small tiles in registers, and their transposition: what attention.c, products.c and mixed.c share. */

#pragma once

#include "common.h"

#ifdef MIXED
#include <immintrin.h>
#ifndef __AVX512BF16__
#error this processor does not multiply bfloat16: it has no AVX512_BF16
#endif
#endif

/* A vector is a register: gcc keeps wider ones in memory. HIGH rows of WIDE vectors are computed together; their sums, and what
 * they are computed from, fill the registers. */
#if defined(__AVX512F__)
#define BYTES 64
#define HIGH 8
#define WIDE 2
#elif defined(__AVX__)
#define BYTES 32
#define HIGH 4
#define WIDE 2
#else
#define BYTES 16
#define HIGH 4
#define WIDE 2
#endif
#define SIZE_float 4
#define SIZE_double 8
#define JOINED(a, b) a##_##b
#define JOIN(a, b) JOINED(a, b)
#define LANES (BYTES / JOIN(SIZE, REAL))
#ifdef __clang__ /* loops whose arrays are registers */
#define UNROLL PRAGMA(clang loop unroll(full))
#else
#define UNROLL PRAGMA(GCC unroll 16)
#endif
#define ALWAYS static inline __attribute__((always_inline))

typedef real vec __attribute__((vector_size(BYTES), aligned(sizeof(real)), may_alias));

/* What a product reads at once: a number; or PAIR = 2 neighbors along the dimension that is summed, rounded to bfloat16, of which one
 * instruction adds both products to a float. */
#ifdef MIXED
#define PAIR 2
typedef uint32_t operand __attribute__((may_alias)); /* written as two numbers */
typedef operand operands __attribute__((vector_size(BYTES), aligned(sizeof(operand)), may_alias));
ALWAYS vec add_product(vec sum, operand a, operands b) {
    return (vec)_mm512_dpbf16_ps((__m512)sum, (__m512bh)_mm512_set1_epi32((int)a), (__m512bh)b);
}

ALWAYS __mmask32 first(size count) { return count >= 32 ? 0xffffffff : ((__mmask32)1 << count) - 1; }

/* `count` ≤ PAIR·LANES neighbors in memory → LANES pairs, the rest 0 */
ALWAYS __m512i pairs_along(const void *x, size floats, size count) {
    __mmask32 mask = first(count);
    if (!floats) return _mm512_maskz_loadu_epi16(mask, x);
    __m512 low = _mm512_maskz_loadu_ps((__mmask16)mask, x);
    __m512 high = _mm512_maskz_loadu_ps((__mmask16)(mask >> 16), (const float *)x + LANES);
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

/* `count` ≤ LANES numbers of a row and those of the row below, which may be missing → LANES pairs, the rest 0 */
ALWAYS __m512i pairs_across(const void *x, const void *below, size floats, size count) {
    __mmask16 mask = (__mmask16)first(count), mask_below = below ? mask : 0;
    __m512i both;
    if (floats) {
        __m512 low = _mm512_maskz_loadu_ps(mask, x), high = _mm512_maskz_loadu_ps(mask_below, below ? below : x);
        both = (__m512i)_mm512_cvtne2ps_pbh(high, low);
    } else {
        __m256i low = _mm256_maskz_loadu_epi16(mask, x), high = _mm256_maskz_loadu_epi16(mask_below, below ? below : x);
        both = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    }
    const __m512i zip = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4,
                                         19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(zip, both);
}
#else
#define PAIR 1
typedef real operand;
typedef vec operands;
ALWAYS vec add_product(vec sum, operand a, operands b) { return sum + a * b; }
#endif

/* HIGH rows and `wide` vectors of c (+)= a b. a[i, k] stands at a[i·ar + k·ak], rows of b and c are contiguous. n, k and the strides
 * of a and b count operands. */
ALWAYS void micro(size wide, size n, const operand *a, size ar, size ak, const operand *b, size bs, real *c, size cs, int add) {
    vec sum[HIGH][WIDE];
    UNROLL for (size i = 0; i < HIGH; i++)
        UNROLL for (size v = 0; v < wide; v++) sum[i][v] = (vec){0};
    for (size k = 0; k < n; k++) {
        operands row[WIDE];
        UNROLL for (size v = 0; v < wide; v++) row[v] = *(const operands *)(b + k * bs + v * LANES);
        UNROLL for (size i = 0; i < HIGH; i++) {
            operand factor = a[i * ar + k * ak];
            UNROLL for (size v = 0; v < wide; v++) sum[i][v] = add_product(sum[i][v], factor, row[v]);
        }
    }
    UNROLL for (size i = 0; i < HIGH; i++)
        UNROLL for (size v = 0; v < wide; v++) {
            vec *out = (vec *)(c + i * cs + v * LANES);
            if (add) sum[i][v] += *out; /* last, not first: a long sum in parts rounds less */
            *out = sum[i][v];
        }
}

/* HIGH rows of c (+)= a b, w columns, a multiple of LANES */
ALWAYS void strip(size w, size n, const operand *a, size ar, size ak, const operand *b, size bs, real *c, size cs, int add) {
    size j = 0;
    for (; j + WIDE * LANES <= w; j += WIDE * LANES) micro(WIDE, n, a, ar, ak, b + j, bs, c + j, cs, add);
    for (; j < w; j += LANES) micro(1, n, a, ar, ak, b + j, bs, c + j, cs, add);
}

/* A square of LANES rows of operands, transposed. Zipping row i with row i + LANES/2, for all i, moves every number's row and lane as one
 * number to the left by a bit; after as many rounds as a lane has bits, rows and lanes have changed places. */
#if defined(__has_builtin)
#if __has_builtin(__builtin_shufflevector) /* clang, gcc 12 */
#define ZIPS
#endif
#endif
ALWAYS void transpose_square(const operand *x, size xs, operand *out, size os) {
#ifdef ZIPS
#if LANES == 16
#define FRONT 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define BACK 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define FRONT 0, 8, 1, 9, 2, 10, 3, 11
#define BACK 4, 12, 5, 13, 6, 14, 7, 15
#elif LANES == 4
#define FRONT 0, 4, 1, 5
#define BACK 2, 6, 3, 7
#else
#define FRONT 0, 2
#define BACK 1, 3
#endif
    vec rows[2][LANES];
    int from = 0;
    UNROLL for (size i = 0; i < LANES; i++) rows[0][i] = *(const vec *)(x + i * xs);
    UNROLL for (size s = 1; s < LANES; s *= 2, from = !from)
        UNROLL for (size i = 0; i < LANES / 2; i++) {
            vec a = rows[from][i], b = rows[from][i + LANES / 2];
            rows[!from][2 * i] = __builtin_shufflevector(a, b, FRONT);
            rows[!from][2 * i + 1] = __builtin_shufflevector(a, b, BACK);
        }
    UNROLL for (size i = 0; i < LANES; i++) *(vec *)(out + i * os) = rows[from][i];
#else
    for (size i = 0; i < LANES; i++)
        for (size j = 0; j < LANES; j++) out[i * os + j] = x[j * xs + i];
#endif
}
