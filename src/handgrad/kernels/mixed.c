/* Matrix products of operands rounded to bfloat16, with sums in float: c = a b, c = bias + a b or c += a b.
 *
 *     |ĉ − c| ≤ (2u + u² + γ) |a| |b|,   u = 2⁻⁸ for the two roundings, γ for the float sums
 *
 * a and b are float, rounded to nearest even while they are copied into the order in which they are read, or bfloat16 already; c is
 * float, or rounded once, at the end. An operand is a pair of neighbors along k. A tile of c belongs to one thread and is summed
 * in one order, so a result does not depend on the number of threads. */

#include "kernels.h"
#include "tiles.h"

#define PANEL (WIDE * LANES)
#define STEPS LANES               /* operands along k that are copied together */
#define NUMBERS (STEPS * PAIR)    /* numbers along k */
#define SQUARE (HIGH * STEPS)     /* operands of a strip of HIGH rows, copied together */
#define DEEP 1024                 /* numbers along k at once: a panel of b stays in the cache */
#define TALL 1024                 /* rows of a at once */

/* A matrix: x[i, k] at i·row + k·column; `floats` or bfloat16 */
typedef struct { const void *x; size floats, row, column; } source;

ALWAYS const void *entry(source s, size i, size k) {
    size at = i * s.row + k * s.column;
    return s.floats ? (const void *)((const float *)s.x + at) : (const void *)((const stored *)s.x + at);
}

ALWAYS __mmask32 first(size count) { return count >= 32 ? 0xffffffff : ((__mmask32)1 << count) - 1; }

/* `count` ≤ NUMBERS neighbors in memory → STEPS pairs, the rest 0 */
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

/* LANES lines of `lines` ≤ LANES that are in the matrix, from number k on: line i of `out` has STEPS operands along k */
ALWAYS void lines_of(source s, size line, size lines, size k, size count, operand *out) {
    if (s.column == 1) {
        for (size i = 0; i < LANES; i++) {
            __m512i x = i < lines ? pairs_along(entry(s, line + i, k), s.floats, count) : _mm512_setzero_si512();
            _mm512_store_si512(out + i * STEPS, x);
        }
        return;
    }
    operand turned[LANES * STEPS] __attribute__((aligned(64)));
    for (size p = 0; p < STEPS; p++) {
        const void *below = PAIR * p + 1 < count ? entry(s, line, k + PAIR * p + 1) : NULL;
        __m512i x = PAIR * p < count ? pairs_across(entry(s, line, k + PAIR * p), below, s.floats, lines) : _mm512_setzero_si512();
        _mm512_store_si512(turned + p * LANES, x);
    }
    transpose_square(turned, LANES, out, STEPS);
}

/* Rows of a, `depth` numbers from k on, as two strips of HIGH rows: squares of HIGH rows and STEPS operands, one after the other */
static void pack_strips(source a, size row, size rows, size k, size depth, operand *out, size strip) {
    operand lines[LANES * STEPS] __attribute__((aligned(64)));
    for (size at = 0; at < depth; at += NUMBERS, out += SQUARE) {
        lines_of(a, row, rows, k + at, depth - at, lines);
        for (size i = 0; i < SQUARE; i += LANES) {
            _mm512_store_si512(out + i, _mm512_load_si512(lines + i));
            if (rows > HIGH) _mm512_store_si512(out + strip + i, _mm512_load_si512(lines + SQUARE + i));
        }
    }
}

/* Columns of b, `depth` numbers from k on, as rows of PANEL operands; b is given as its transpose, whose lines are columns */
static void pack_panel(source b, size column, size columns, size k, size depth, operand *out) {
    operand lines[LANES * STEPS] __attribute__((aligned(64)));
    for (size at = 0; at < depth; at += NUMBERS, out += STEPS * PANEL)
        for (size j = 0; j < PANEL; j += LANES) {
            size left = columns - j < 0 ? 0 : columns - j, count = depth - at;
            if (b.column == 1) {
                lines_of(b, column + j, left, k + at, count, lines);
                transpose_square(lines, STEPS, out + j, PANEL);
                continue;
            }
            for (size p = 0; p < STEPS; p++) {
                if (PAIR * p + 1 < count && left == LANES) /* the same rows of the next panel, while this one is multiplied */
                    for (size i = 0; i < PAIR; i++) __builtin_prefetch(entry(b, column + j + PANEL, k + at + PAIR * p + i), 0, 2);
                const void *below = PAIR * p + 1 < count ? entry(b, column + j, k + at + PAIR * p + 1) : NULL;
                __m512i x = _mm512_setzero_si512();
                if (PAIR * p < count && left)
                    x = pairs_across(entry(b, column + j, k + at + PAIR * p), below, b.floats, left);
                _mm512_store_si512(out + p * PANEL + j, x);
            }
        }
}

/* The result: c[i, j] at i·row + j */
typedef struct { void *c; size floats, row, add; const float *bias; } result;

ALWAYS void *target(result c, size i, size j) {
    size at = i * c.row + j;
    return c.floats ? (void *)((float *)c.c + at) : (void *)((stored *)c.c + at);
}

/* A tile of `high` ≤ HIGH rows and `wide` ≤ PANEL columns of c, from `squares` of a and rows of a panel of b */
static void tile(size squares, const operand *a, const operand *b, size high, size wide, result c) {
    for (size i = 0; i < high; i++) /* c arrives while the sums are computed: a sixth of the time */
        for (size j = 0; j < wide; j += LANES) __builtin_prefetch(target(c, i, j), 1, 2);
    vec sum[HIGH][WIDE];
    UNROLL for (size i = 0; i < HIGH; i++)
        UNROLL for (size v = 0; v < WIDE; v++) sum[i][v] = (vec){0};
    for (; squares--; a += SQUARE)
        for (size p = 0; p < STEPS; p++, b += PANEL) {
            operands row[WIDE];
            UNROLL for (size v = 0; v < WIDE; v++) row[v] = *(const operands *)(b + v * LANES);
            UNROLL for (size i = 0; i < HIGH; i++)
                UNROLL for (size v = 0; v < WIDE; v++) sum[i][v] = add_product(sum[i][v], a[i * STEPS + p], row[v]);
        }
    UNROLL for (size i = 0; i < HIGH; i++)
        UNROLL for (size v = 0; v < WIDE; v++) {
            if (i >= high || v * LANES >= wide) continue;
            __mmask16 mask = (__mmask16)first(wide - v * LANES);
            __m512 x = (__m512)sum[i][v];
            if (c.bias) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, c.bias + v * LANES));
            if (c.floats) {
                float *out = target(c, i, v * LANES);
                if (c.add) x = _mm512_add_ps(x, _mm512_maskz_loadu_ps(mask, out)); /* last, not first: parts round less */
                _mm512_mask_storeu_ps(out, mask, x);
            } else {
                _mm256_mask_storeu_epi16(target(c, i, v * LANES), mask, (__m256i)_mm512_cvtneps_pbh(x));
            }
        }
}

/* c (m, w) (+)= a (m, n) b (n, w); bias (w) or null. A c that is rounded is not added to, and n is at most DEEP. Returns 0 or
 * NO_MEMORY. */
int hg_mixed_product(size m, size w, size n, const void *a, size a_floats, size ar, size ak, const void *b, size b_floats,
                     size bk, size bj, const float *bias, void *c, size c_floats, size cs, size add) {
    int failed = 0;
    source left = {a, a_floats, ar, ak}, right = {b, b_floats, bj, bk};
    size deep = n < DEEP ? n : DEEP, squares = (deep + NUMBERS - 1) / NUMBERS, strip = squares * SQUARE;
    size tall = m < TALL ? m : TALL, panels = (w + PANEL - 1) / PANEL;
    size part = panels < 8 ? 64 : TALL; /* rows of one item of work: with few panels, several threads share one */
    operand *strips = (operand *)new_buffer((tall + LANES - 1) / LANES * 2 * strip);
    if (!strips) return NO_MEMORY;
#pragma omp parallel if (m * w * n >= (size)1 << 16)
    {
        operand *panel = (operand *)new_buffer(squares * STEPS * PANEL);
        if (!panel) {
#pragma omp atomic write
            failed = NO_MEMORY;
        }
        for (size k = 0; k < n; k += deep) {
            size depth = n - k < deep ? n - k : deep, count = (depth + NUMBERS - 1) / NUMBERS;
            for (size top = 0; top < m; top += tall) {
                size rows = m - top < tall ? m - top : tall, parts = (rows + part - 1) / part;
#pragma omp for schedule(static)
                for (size i = 0; i < rows; i += LANES)
                    pack_strips(left, top + i, rows - i < LANES ? rows - i : LANES, k, depth, strips + i / HIGH * strip, strip);
#pragma omp for schedule(static)
                for (size item = 0; item < panels * parts; item++) {
                    size j = item / parts * PANEL, start = item % parts * part, wide = w - j < PANEL ? w - j : PANEL;
                    size stop = start + part < rows ? start + part : rows;
                    if (!panel) continue;
                    pack_panel(right, j, wide, k, depth, panel);
                    for (size i = start; i < stop; i += HIGH) {
                        result out = {target((result){c, c_floats, cs}, top + i, j), c_floats, cs, add || k,
                                      bias && !k ? bias + j : NULL};
                        tile(count, strips + i / HIGH * strip, panel, stop - i < HIGH ? stop - i : HIGH, wide, out);
                    }
                }
            }
        }
        free(panel);
    }
    free(strips);
    return failed;
}
