/* Products of rounded activations with packed weights, out = a' wᵗ, w (f_out, f_in) in blocks of kind 0, 1 or 2 (packed.c).
 *
 *     a' = d_a q_a     q_a of 8 bits, d_a a float for every 32 numbers of a row (ops/packed.py, round_to_8_bits)
 *     out = Σ_blocks d_w d_a (Σ q_w q_a) + m d_a (Σ q_a)
 *
 * The sums of a block are of integers, which are exact, and blocks are added in their order. So a row has the same bits beside
 * any other rows: rounding would make a difference in the last bit of an activation as large as its step. With AVX512_VNNI one
 * instruction adds 64 products. Always float, whatever REAL is. */

#include <string.h>

#include "decode.h"
#include "kernels.h"
#include "packed.h"

#define MOST 16 /* rows that are multiplied together */
#if defined(__AVX512VNNI__) && defined(__AVX512BW__)
#define VNNI
#define VECTOR 64 /* bytes of q_a that one instruction multiplies */
#define FEW 4     /* rows that are multiplied together if this is done in at most two steps */
#else
#define VECTOR (MOST * PER_BLOCK)
#define FEW MOST
#endif
#define OUTPUTS 4  /* that are computed together */
#define STRIP 32   /* outputs that meet some rows while both are in the cache */
#define AHEAD 4096 /* bytes of w that are requested before they are needed: hardware does not follow several rows at once */

/* A block of `rows` rows of a: VECTOR / rows bytes of each row, then the next bytes of each. d and sum are repeated for every output,
 * so that they fill a vector: d of row t stands at t · (MOST / rows). */
struct group { int8_t q[MOST * PER_BLOCK]; float d[MOST]; int32_t sum[MOST]; };

/* The next rows of `left`, which are one group in each block */
INLINE size rows_of_group(size left) { return left <= 2 * FEW ? FEW : MOST; }

size rounded_size(size n, size f_in) { return (n / MOST + 2) * (f_in / PER_BLOCK) * (size)(sizeof(group) / sizeof(real)); }

/* Row t of a group. A number that is not finite makes d NaN, and with it all results of the row. */
static void round_block(const float *a, size t, size rows, group *out) {
    const size wide = VECTOR / rows, lanes = MOST / rows;
    union { float f; uint32_t i; } top = {.i = 0}, bits;
    for (int k = 0; k < PER_BLOCK; k++) {
        bits.f = a[k];
        bits.i &= 0x7fffffff;
        top.i = bits.i > top.i ? bits.i : top.i;
    }
    int finite = top.i < 0x7f800000;
    double inverse = top.i && finite ? 127 / (double)top.f : 0; /* of a denormal number it is no float */
    int8_t q[PER_BLOCK];
    int32_t sum = 0;
    for (int k = 0; k < PER_BLOCK; k++) q[k] = finite ? (int8_t)(int32_t)rint((double)a[k] * inverse) : 0;
    for (int k = 0; k < PER_BLOCK; k++) sum += q[k];
    for (size j = 0; j < PER_BLOCK / wide; j++) memcpy(out->q + j * VECTOR + t * wide, q + j * wide, (size_t)wide);
    for (size l = t * lanes; l < (t + 1) * lanes; l++) out->d[l] = finite ? (float)((double)top.f / 127) : NAN, out->sum[l] = sum;
}

void round_part(size n, size f_in, const float *a, size as, group *out) {
    size blocks = f_in / PER_BLOCK, first, end, rows;
    static const float zeros[PER_BLOCK];
    share_of(blocks, 1, &first, &end);
    for (size t = 0; t < n; t += rows, out += blocks) {
        rows = rows_of_group(n - t);
        for (size b = first; b < end; b++)
            for (size r = 0; r < rows; r++)
                round_block(t + r < n ? a + (t + r) * as + b * PER_BLOCK : zeros, r, rows, out + b);
    }
}

/* `count` ≤ OUTPUTS outputs of n rows, which are one group in each block */
typedef struct { size blocks, count, n; const group *a; const uint8_t *w; float *out; size os; } tile;

/* The rows of w; if there are fewer, the last one again */
INLINE void rows_of(int kind, const tile *x, const uint8_t *row[OUTPUTS]) {
    for (size o = 0; o < OUTPUTS; o++) row[o] = x->w + (o < x->count ? o : x->count - 1) * x->blocks * block_bytes(kind);
}

#ifdef VNNI

/* q of w is an unsigned number for the instruction: the result is larger by this many times Σ q_a, 2 to the power of */
INLINE int shift(int kind) { return kind == 0 ? 7 : 3; }

INLINE void request(const uint8_t *w, size bytes) {
    for (size i = 0; i < OUTPUTS * bytes; i += 64) __builtin_prefetch(w + AHEAD + i);
}

/* 32 unsigned q, each half of them four times */
INLINE void broadcast_codes(int kind, const uint8_t *x, __m512i *low, __m512i *high) {
    const uint8_t *q = x + (kind == 2 ? 4 : 2);
    __m512i first = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)q));
    if (kind == 0) {
        const __m512i sign = _mm512_set1_epi8(-128);
        *low = _mm512_xor_si512(first, sign);
        *high = _mm512_xor_si512(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(q + 16))), sign);
    } else {
        const __m512i nibble = _mm512_set1_epi8(15);
        *low = _mm512_and_si512(first, nibble);
        *high = _mm512_and_si512(_mm512_srli_epi16(first, 4), nibble);
    }
}

/* a float16 of each output, for every row */
INLINE __m512 broadcast_scales(const uint8_t *const row[OUTPUTS], size at) {
    uint16_t d[OUTPUTS];
    for (int o = 0; o < OUTPUTS; o++) memcpy(d + o, row[o] + at, 2);
    return _mm512_broadcast_f32x4(_mm_cvtph_ps(_mm_setr_epi16((short)d[0], (short)d[1], (short)d[2], (short)d[3], 0, 0, 0, 0)));
}

/* FEW rows: a lane for four numbers of a row, then for every row and output */
INLINE void few(int kind, const tile *x) {
    const uint8_t *row[OUTPUTS];
    const size bytes = block_bytes(kind);
    rows_of(kind, x, row);
    __m512 total = _mm512_setzero_ps();
    for (size b = 0; b < x->blocks; b++) {
        const group *g = x->a + b;
        __m512i dot[OUTPUTS], sum = _mm512_loadu_si512(g->sum);
        request(x->w + b * OUTPUTS * bytes, bytes);
        for (int o = 0; o < OUTPUTS; o++) {
            __m512i low, high;
            broadcast_codes(kind, row[o], &low, &high);
            dot[o] = _mm512_dpbusd_epi32(_mm512_setzero_si512(), low, _mm512_loadu_si512(g->q));
            dot[o] = _mm512_dpbusd_epi32(dot[o], high, _mm512_loadu_si512(g->q + VECTOR));
        }
        for (int o = 0; o < OUTPUTS; o += 2)
            dot[o] = _mm512_add_epi32(_mm512_unpacklo_epi32(dot[o], dot[o + 1]), _mm512_unpackhi_epi32(dot[o], dot[o + 1]));
        __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(dot[0], dot[2]), _mm512_unpackhi_epi64(dot[0], dot[2]));
        if (kind != 2) all = _mm512_sub_epi32(all, _mm512_slli_epi32(sum, shift(kind)));
        __m512 d = _mm512_loadu_ps(g->d);
        total = _mm512_fmadd_ps(_mm512_cvtepi32_ps(all), _mm512_mul_ps(broadcast_scales(row, 0), d), total);
        if (kind == 2) total = _mm512_fmadd_ps(broadcast_scales(row, 2), _mm512_mul_ps(d, _mm512_cvtepi32_ps(sum)), total);
        for (int o = 0; o < OUTPUTS; o++) row[o] += bytes;
    }
    float out[FEW][OUTPUTS];
    _mm512_storeu_ps(out, total);
    for (size t = 0; t < x->n; t++) memcpy(x->out + t * x->os, out[t], (size_t)x->count * sizeof(float));
}

/* MOST rows: a lane for every row */
INLINE void many(int kind, const tile *x) {
    const uint8_t *row[OUTPUTS];
    const size bytes = block_bytes(kind);
    rows_of(kind, x, row);
    __m512 total[OUTPUTS];
    for (int o = 0; o < OUTPUTS; o++) total[o] = _mm512_setzero_ps();
    for (size b = 0; b < x->blocks; b++) {
        const group *g = x->a + b;
        uint8_t codes[OUTPUTS][PER_BLOCK];
        __m512i dot[OUTPUTS], sum = _mm512_loadu_si512(g->sum), offset = _mm512_setzero_si512();
        if (kind != 2) offset = _mm512_sub_epi32(offset, _mm512_slli_epi32(sum, shift(kind)));
        request(x->w + b * OUTPUTS * bytes, bytes);
        for (int o = 0; o < OUTPUTS; o++) {
            const uint8_t *q = row[o] + (kind == 2 ? 4 : 2);
            dot[o] = offset;
            if (kind == 0) {
                __m256i all = _mm256_loadu_si256((const __m256i *)q);
                _mm256_storeu_si256((__m256i *)codes[o], _mm256_xor_si256(all, _mm256_set1_epi8(-128)));
            } else {
                __m128i both = _mm_loadu_si128((const __m128i *)q), nibble = _mm_set1_epi8(15);
                _mm_storeu_si128((__m128i *)codes[o], _mm_and_si128(both, nibble));
                _mm_storeu_si128((__m128i *)(codes[o] + 16), _mm_and_si128(_mm_srli_epi16(both, 4), nibble));
            }
        }
        for (int j = 0; j < PER_BLOCK / 4; j++)
            for (int o = 0; o < OUTPUTS; o++) {
                int32_t four;
                memcpy(&four, codes[o] + 4 * j, 4);
                dot[o] = _mm512_dpbusd_epi32(dot[o], _mm512_set1_epi32(four), _mm512_loadu_si512(g->q + j * VECTOR));
            }
        __m512 d = _mm512_loadu_ps(g->d), d_sum = _mm512_mul_ps(d, _mm512_cvtepi32_ps(sum));
        for (int o = 0; o < OUTPUTS; o++) {
            total[o] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[o]), _mm512_mul_ps(_mm512_set1_ps(half(row[o])), d), total[o]);
            if (kind == 2) total[o] = _mm512_fmadd_ps(_mm512_set1_ps(half(row[o] + 2)), d_sum, total[o]);
            row[o] += bytes;
        }
    }
    float out[OUTPUTS][MOST];
    for (int o = 0; o < OUTPUTS; o++) _mm512_storeu_ps(out[o], total[o]);
    for (size t = 0; t < x->n; t++)
        for (size o = 0; o < x->count; o++) x->out[t * x->os + o] = out[o][t];
}

INLINE void multiply(int kind, const tile *x, size rows) {
    if (rows == FEW) few(kind, x);
    else many(kind, x);
}

#else

/* Row after row, in the instructions that the compiler knows */
INLINE void multiply(int kind, const tile *x, size rows) {
    const uint8_t *row[OUTPUTS];
    const size bytes = block_bytes(kind);
    (void)rows;
    rows_of(kind, x, row);
    for (size o = 0; o < x->count; o++) {
        float total[MOST] = {0};
        for (size b = 0; b < x->blocks; b++) {
            const group *g = x->a + b;
            const uint8_t *w = row[o] + b * bytes, *given = w + (kind == 2 ? 4 : 2);
            const float d = half(w), m = kind == 2 ? half(w + 2) : 0;
            int8_t q[PER_BLOCK];
            if (kind == 0) memcpy(q, given, PER_BLOCK);
            for (int k = 0; k < PER_BLOCK / 2 && kind; k++) {
                q[k] = (int8_t)((given[k] & 15) - (kind == 1 ? 8 : 0));
                q[k + PER_BLOCK / 2] = (int8_t)((given[k] >> 4) - (kind == 1 ? 8 : 0));
            }
            for (size t = 0; t < x->n; t++) {
                const int8_t *a = g->q + t * PER_BLOCK;
                int32_t dot = 0;
                for (int k = 0; k < PER_BLOCK; k++) dot += q[k] * a[k];
                total[t] += (float)dot * (d * g->d[t]);
                if (kind == 2) total[t] += m * (g->d[t] * (float)g->sum[t]);
            }
        }
        for (size t = 0; t < x->n; t++) x->out[t * x->os + o] = total[t];
    }
}

#endif

INLINE void product(int kind, size n, size f_in, size f_out, const group *a, const uint8_t *w, float *out, size os) {
    size blocks = f_in / PER_BLOCK, width = blocks * block_bytes(kind), first, end, rows;
    share_of(f_out, OUTPUTS, &first, &end);
    for (; first < end; first += STRIP) {
        const group *g = a;
        size stop = first + STRIP < end ? first + STRIP : end;
        for (size t = 0; t < n; t += rows, g += blocks) {
            rows = rows_of_group(n - t);
            for (size o = first; o < stop; o += OUTPUTS) {
                tile x = {blocks, stop - o < OUTPUTS ? stop - o : OUTPUTS, n - t < rows ? n - t : rows, g, w + o * width,
                          out + t * os + o, os};
                multiply(kind, &x, rows);
            }
        }
    }
}

void rounded_product_part(size kind, size n, size f_in, size f_out, const group *a, const uint8_t *w, float *out, size os) {
    if (kind == 0) product(0, n, f_in, f_out, a, w, out, os);
    if (kind == 1) product(1, n, f_in, f_out, a, w, out, os);
    if (kind == 2) product(2, n, f_in, f_out, a, w, out, os);
}

int hg_rounded_product(size kind, size n, size f_in, size f_out, const float *a, size as, const uint8_t *w, float *out, size os) {
    group *rounded = (group *)new_buffer(rounded_size(n, f_in));
    if (!rounded) return NO_MEMORY;
    PRAGMA(omp parallel if (f_in * f_out >= PARALLEL_FROM)) {
        round_part(n, f_in, a, as, rounded);
        PRAGMA(omp barrier)
        rounded_product_part(kind, n, f_in, f_out, rounded, w, out, os);
    }
    free(rounded);
    return 0;
}
