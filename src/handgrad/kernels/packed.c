/* Products with packed weights, out = a wᵗ, and unpacking: w (f_out, f_in) in the blocks of GGUF files (ops/packed.py).
 *
 *     kind 0   Q8_0   34 bytes: d, 32 q (int8)           w = d q
 *     kind 1   Q4_0   18 bytes: d, 16 bytes of nibbles   w = d (q − 8)
 *     kind 2   Q4_1   20 bytes: d, m, 16 nibbles         w = d q + m
 *     kind 3   BF16   64 bytes: 32 w (bfloat16)
 *     kind 9   MXFP4  17 bytes: e, 16 nibbles            w = 2^(e − 128) c, c twice the float of 4 bits
 *
 * and, to be unpacked only, five bits and K-quants, in groups g of 32 or (Q6_K) 16 of a block's 256 numbers:
 *
 *     kind 4   Q5_0   22 bytes: d, 32 bits, 16 nibbles        w = d (q − 16)
 *     kind 5   Q5_1   24 bytes: d, m, 32 bits, 16 nibbles     w = d q + m
 *     kind 6   Q4_K   144 bytes: d, m, 12 of scales, 128      w = (d s_g) q − m t_g
 *     kind 7   Q5_K   176 bytes: d, m, 12 of scales, 32, 128  w = (d s_g) q − m t_g
 *     kind 8   Q6_K   210 bytes: 128, 64, 16 s_g (int8), d    w = (d s_g) (q − 32)
 *
 * A product with one or a few rows waits for the weights to arrive from memory, so a weight of 4 bits is used in an eighth of
 * the time of a float. A block becomes the same 32 floats as those that ops/packed.py unpacks, in registers; the sums are of
 * floats. Always float, whatever REAL is. */

#include "decode.h"
#include "kernels.h"
#include "packed.h"

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define VECTORS (PER_BLOCK / LANES) /* of a block */

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef int8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t shorts __attribute__((vector_size(2 * LANES), aligned(1), may_alias));

/* LANES bytes as integers; gcc compiles the general form to one byte after the other */
INLINE ints widen(const uint8_t *x) {
#if LANES == 16
    return (ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)x));
#elif LANES == 8
    return (ints)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)x));
#else
    return __builtin_convertvector(*(const bytes *)x, ints);
#endif
}

/* 2^(e − 128), which is denormal for e = 0 and 1 */
INLINE float power_of_2(uint32_t e) {
    union { uint32_t i; float f; } u = {.i = e < 2 ? 0x200000u << e : e - 1 << 23};
    return u.f;
}

/* the integers that nibbles stand for: of kind 9, ±(0, 1, 2, 3, 4, 6, 8, 12), two bits of exponent and one of fraction */
INLINE ints integers(int kind, ints q) {
    if (kind != 9) return kind == 1 ? q - 8 : q;
    ints size = q & 7, sign = -(q >> 3 & 1);
    size = ((2 + (size & 1)) << (size >> 1) >> 1) + (size == 0); /* a comparison is −1 where it is true */
    return (size ^ sign) - sign;
}

/* the 32 numbers of a block */
INLINE void unpack_block(int kind, const uint8_t *x, floats w[VECTORS]) {
    if (kind == 3) {
        for (int v = 0; v < VECTORS; v++)
            w[v] = (floats)(__builtin_convertvector(*(const shorts *)(x + 2 * v * LANES), words) << 16);
        return;
    }
    float d = kind == 9 ? power_of_2(x[0]) : half(x);
    if (kind == 0) {
        for (int v = 0; v < VECTORS; v++) {
            ints q = widen(x + 2 + v * LANES);
            w[v] = d * __builtin_convertvector(q, floats);
        }
        return;
    }
    float m = kind == 2 ? half(x + 2) : 0;
    const uint8_t *nibbles = x + (kind == 9 ? 1 : kind == 1 ? 2 : 4);
#if LANES == 16 /* a table of the 16 numbers; the index is the low four bits */
    const ints steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    floats table = d * __builtin_convertvector(integers(kind, steps), floats);
    if (kind == 2) table += m;
    ints q = widen(nibbles);
    w[0] = (floats)_mm512_permutexvar_ps((__m512i)q, (__m512)table);
    w[1] = (floats)_mm512_permutexvar_ps((__m512i)(q >> 4), (__m512)table);
#else
    for (int v = 0; v < VECTORS / 2; v++) {
        ints q = widen(nibbles + v * LANES);
        w[v] = d * __builtin_convertvector(integers(kind, q & 15), floats);
        w[v + VECTORS / 2] = d * __builtin_convertvector(integers(kind, q >> 4 & 15), floats);
        if (kind == 2) w[v] += m, w[v + VECTORS / 2] += m;
    }
#endif
}

INLINE float sum(floats x) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += x[i];
    return total;
}

/* `rows` rows of a times one row of w: each block is unpacked once for all of them */
INLINE void dots(int kind, int rows, size blocks, const float *a, size as, const uint8_t *w, float *out, size os) {
    floats total[8][2]; /* registers: `rows` is constant, and at most 8 */
    for (int r = 0; r < rows; r++) total[r][0] = total[r][1] = (floats){0};
    for (size b = 0; b < blocks; b++) {
        floats x[VECTORS];
        unpack_block(kind, w + b * block_bytes(kind), x);
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++)
                total[r][v % 2] += x[v] * *(const floats *)(a + r * as + b * PER_BLOCK + v * LANES);
    }
    for (int r = 0; r < rows; r++) out[r * os] = sum(total[r][0] + total[r][1]);
}

#define AT_ONCE 8 /* rows of w that meet some rows of a while those are in the cache */

INLINE void product(int kind, size n, size f_in, size f_out, const float *a, size as, const uint8_t *w, float *out, size os) {
    size blocks = f_in / PER_BLOCK, width = blocks * block_bytes(kind), first, end;
    share_of(f_out, AT_ONCE, &first, &end);
    for (size stop; first < end; first = stop) {
        stop = first + AT_ONCE < end ? first + AT_ONCE : end;
#define SOME(rows)                                                                                                       \
    for (; t + rows <= n; t += rows)                                                                                     \
        for (size o = first; o < stop; o++) dots(kind, rows, blocks, a + t * as, as, w + o * width, out + t * os + o, os);
        size t = 0;
        SOME(8) SOME(4) SOME(2) SOME(1)
    }
}

void packed_product_part(size kind, size n, size f_in, size f_out, const float *a, size as, const uint8_t *w, float *out,
                         size os) {
    if (kind == 0) product(0, n, f_in, f_out, a, as, w, out, os);
    if (kind == 1) product(1, n, f_in, f_out, a, as, w, out, os);
    if (kind == 2) product(2, n, f_in, f_out, a, as, w, out, os);
    if (kind == 3) product(3, n, f_in, f_out, a, as, w, out, os);
    if (kind == 9) product(9, n, f_in, f_out, a, as, w, out, os);
}

void hg_packed_product(size kind, size n, size f_in, size f_out, const float *a, size as, const uint8_t *w, float *out,
                       size os) {
    PRAGMA(omp parallel if (f_in * f_out >= PARALLEL_FROM))
    packed_product_part(kind, n, f_in, f_out, a, as, w, out, os);
}

/* ── unpacking ─────────────────────────────────────────────────────────────────────────────────────────────────────────── */

/* 32 numbers of five bits: nibbles, and bit j of a word for number j */
INLINE void unpack_five_bits(int kind, const uint8_t *x, floats w[VECTORS]) {
    const uint8_t *bits = x + (kind == 4 ? 2 : 4);
    int32_t word = 0;
    for (int i = 0; i < 4; i++) word |= (int32_t)((uint32_t)bits[i] << 8 * i);
    const float d = half(x), m = kind == 5 ? half(x + 2) : 0;
    const int middle = kind == 4 ? 16 : 0;
    ints place;
    for (int i = 0; i < LANES; i++) place[i] = i;
    for (int v = 0; v < VECTORS; v++) {
        ints low = widen(bits + 4 + v % (VECTORS / 2) * LANES) >> (v < VECTORS / 2 ? 0 : 4) & 15;
        ints q = low | ((place - place + word) >> (place + v * LANES) & 1) << 4;
        w[v] = d * __builtin_convertvector(q - middle, floats);
        if (kind == 5) w[v] += m;
    }
}

/* numbers 32 g … 32 g + 31 of a block of 256; the scales of 6 bits: ops/packed.py, _six_bits */
INLINE void unpack_group(int kind, const uint8_t *x, int g, floats w[VECTORS]) {
    if (kind == 8) {
        const uint8_t *nibbles = x + g / 4 * 64 + g % 2 * 32, *pairs = x + 128 + g / 4 * 32;
        const float d = half(x + 208);
        for (int v = 0; v < VECTORS; v++) {
            ints low = widen(nibbles + v * LANES) >> g % 4 / 2 * 4 & 15, high = widen(pairs + v * LANES) >> g % 4 * 2 & 3;
            const float scale = d * (int8_t)x[192 + 2 * g + v * LANES / 16];
            w[v] = scale * __builtin_convertvector((low | high << 4) - 32, floats);
        }
        return;
    }
    const uint8_t *b = x + 4, *nibbles = x + (kind == 6 ? 16 : 48) + g / 2 * 32;
    const int s = g < 4 ? b[g] & 63 : (b[g + 4] & 15) | (b[g - 4] >> 2 & 48);
    const int t = g < 4 ? b[g + 4] & 63 : b[g + 4] >> 4 | (b[g] >> 2 & 48);
    const float scale = half(x) * s, offset = half(x + 2) * t;
    for (int v = 0; v < VECTORS; v++) {
        ints q = widen(nibbles + v * LANES) >> g % 2 * 4 & 15;
        if (kind == 7) q |= (widen(x + 16 + v * LANES) >> g & 1) << 4;
        w[v] = scale * __builtin_convertvector(q, floats) - offset;
    }
}

/* 32 numbers to `out` as floats, or rounded to bfloat16: to nearest, ties to even; NaN stays NaN. Those of kind 9 are exact. */
INLINE void store(int kind, const floats w[VECTORS], void *out, size at, size as_floats) {
    for (int v = 0; v < VECTORS; v++) {
        if (as_floats) {
            *(floats *)((float *)out + at + v * LANES) = w[v];
            continue;
        }
        if (kind == 9) {
            *(shorts *)((uint16_t *)out + at + v * LANES) = __builtin_convertvector((words)w[v] >> 16, shorts);
            continue;
        }
#ifdef __AVX512BF16__ /* would make denormal floats 0: all numbers here are multiples of 2⁻²⁴ */
        _mm256_storeu_si256((__m256i *)((uint16_t *)out + at + v * LANES), (__m256i)_mm512_cvtneps_pbh((__m512)w[v]));
#else
        words x = (words)w[v], rounded = x + 0x7fff + (x >> 16 & 1), nan = (words)(w[v] != w[v]);
        x = (rounded & ~nan) | ((x | 0x400000) & nan);
        *(shorts *)((uint16_t *)out + at + v * LANES) = __builtin_convertvector(x >> 16, shorts);
#endif
    }
}

INLINE void unpack(int kind, size bytes, int groups, size blocks, const uint8_t *w, void *out, size as_floats) {
    size first, end;
    share_of(blocks, 1, &first, &end);
    for (size b = first; b < end; b++)
        for (int g = 0; g < groups; g++) {
            floats x[VECTORS];
            if (kind >= 6 && kind < 9) unpack_group(kind, w + b * bytes, g, x);
            else if (kind == 4 || kind == 5) unpack_five_bits(kind, w + b * bytes, x);
            else unpack_block(kind, w + b * bytes, x);
            store(kind, x, out, (b * groups + g) * PER_BLOCK, as_floats);
        }
}

/* out: the numbers of all blocks, floats or bfloat16 */
void hg_packed_unpack(size kind, size blocks, const uint8_t *w, void *out, size as_floats) {
#define OF_KIND(k, bytes, groups)                                                                                        \
    if (kind == k && as_floats) unpack(k, bytes, groups, blocks, w, out, 1);                                             \
    if (kind == k && !as_floats) unpack(k, bytes, groups, blocks, w, out, 0);
    PRAGMA(omp parallel if (blocks * (kind < 6 || kind == 9 ? 1 : 8) * PER_BLOCK >= PARALLEL_FROM)) {
        OF_KIND(0, 34, 1) OF_KIND(1, 18, 1) OF_KIND(2, 20, 1) OF_KIND(4, 22, 1) OF_KIND(5, 24, 1)
        OF_KIND(6, 144, 8) OF_KIND(7, 176, 8) OF_KIND(8, 210, 8) OF_KIND(9, 17, 1)
    }
}
