/* Products with packed weights, out = a wᵗ, and unpacking: w (f_out, f_in) in the blocks of GGUF files (ops/packed.py).
 *
 *     kind 0   Q8_0   34 bytes: d, 32 q (int8)           w = d q
 *     kind 1   Q4_0   18 bytes: d, 16 bytes of nibbles   w = d (q − 8)
 *     kind 2   Q4_1   20 bytes: d, m, 16 nibbles         w = d q + m
 *     kind 3   BF16   64 bytes: 32 w (bfloat16)
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

/* the 32 numbers of a block */
INLINE void unpack_block(int kind, const uint8_t *x, floats w[VECTORS]) {
    if (kind == 3) {
        for (int v = 0; v < VECTORS; v++)
            w[v] = (floats)(__builtin_convertvector(*(const shorts *)(x + 2 * v * LANES), words) << 16);
        return;
    }
    float d = half(x);
    if (kind == 0) {
        for (int v = 0; v < VECTORS; v++) {
            ints q = widen(x + 2 + v * LANES);
            w[v] = d * __builtin_convertvector(q, floats);
        }
        return;
    }
    float m = kind == 2 ? half(x + 2) : 0;
    const uint8_t *nibbles = x + (kind == 1 ? 2 : 4);
    const int middle = kind == 1 ? 8 : 0;
#if LANES == 16 /* a table of the 16 numbers; the index is the low four bits */
    const ints steps = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    floats table = d * __builtin_convertvector(steps - middle, floats);
    if (kind == 2) table += m;
    ints q = widen(nibbles);
    w[0] = (floats)_mm512_permutexvar_ps((__m512i)q, (__m512)table);
    w[1] = (floats)_mm512_permutexvar_ps((__m512i)(q >> 4), (__m512)table);
#else
    for (int v = 0; v < VECTORS / 2; v++) {
        ints q = widen(nibbles + v * LANES);
        w[v] = d * __builtin_convertvector((q & 15) - middle, floats);
        w[v + VECTORS / 2] = d * __builtin_convertvector((q >> 4 & 15) - middle, floats);
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
}

void hg_packed_product(size kind, size n, size f_in, size f_out, const float *a, size as, const uint8_t *w, float *out,
                       size os) {
    PRAGMA(omp parallel if (f_in * f_out >= PARALLEL_FROM))
    packed_product_part(kind, n, f_in, f_out, a, as, w, out, os);
}

/* out: 32 floats of each block */
void hg_packed_unpack(size kind, size blocks, const uint8_t *w, float *out) {
    ROWS(blocks, PER_BLOCK) for (size b = 0; b < blocks; b++) {
        floats *x = (floats *)(out + b * PER_BLOCK), y[VECTORS];
        if (kind == 0) unpack_block(0, w + b * block_bytes(0), y);
        else if (kind == 1) unpack_block(1, w + b * block_bytes(1), y);
        else if (kind == 2) unpack_block(2, w + b * block_bytes(2), y);
        else unpack_block(3, w + b * block_bytes(3), y);
        for (int v = 0; v < VECTORS; v++) x[v] = y[v];
    }
}
