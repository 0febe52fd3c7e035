/* Matrix products of operands rounded to bfloat16, with sums in float: c = a b, c = bias + a b or c += a b, to each
 * of which a second product h v, of an adapter, may be added.
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
#define DEEP 2048                 /* numbers along k at once: a panel of b stays in the cache */
#define TALL 1024                 /* rows of a that are copied at once */
#define SAME_SETS 4096            /* bytes: rows this far apart share the sets of the first cache */

/* A matrix: x[i, k] at i·row + k·column; `floats` or bfloat16 */
typedef struct { const void *x; size floats, row, column; } source;

ALWAYS const void *entry(source s, size i, size k) {
    size at = i * s.row + k * s.column;
    return s.floats ? (const void *)((const float *)s.x + at) : (const void *)((const stored *)s.x + at);
}

/* LANES lines, of which `lines` are in the matrix and the others 0, from number k on: line i of `out` has STEPS operands along k */
ALWAYS void lines_of(source s, size line, size lines, size k, size count, operand *out, size os) {
    if (s.column == 1) {
        for (size i = 0; i < LANES; i++) {
            __m512i x = i < lines ? pairs_along(entry(s, line + i, k), s.floats, count) : _mm512_setzero_si512();
            _mm512_storeu_si512(out + i * os, x);
        }
        return;
    }
    operand turned[LANES * STEPS] __attribute__((aligned(64)));
    for (size p = 0; p < STEPS; p++) {
        const void *below = PAIR * p + 1 < count ? entry(s, line, k + PAIR * p + 1) : NULL;
        __m512i x = PAIR * p < count ? pairs_across(entry(s, line, k + PAIR * p), below, s.floats, lines) : _mm512_setzero_si512();
        _mm512_store_si512(turned + p * LANES, x);
    }
    transpose_square(turned, LANES, out, os);
}

/* Columns of b, `depth` numbers from k on, as rows of PANEL operands; b is given as its transpose, whose lines are columns. The
 * next panel, if this one is full, is fetched while this one is multiplied. */
static void pack_panel(source b, size column, size columns, size k, size depth, operand *out) {
    operand lines[LANES * STEPS] __attribute__((aligned(64)));
    size in_64_bytes = b.floats ? LANES : NUMBERS;
    for (size at = 0; at < depth; at += NUMBERS, out += STEPS * PANEL)
        for (size j = 0; j < PANEL; j += LANES) {
            size left = columns - j < 0 ? 0 : columns - j, count = depth - at;
            if (b.column == 1) {
                for (size i = 0; columns == PANEL && i < LANES; i++)
                    for (size x = 0; x < NUMBERS; x += in_64_bytes)
                        __builtin_prefetch(entry(b, column + j + PANEL + i, k + at + x), 0, 2);
                lines_of(b, column + j, left, k + at, count, lines, STEPS);
                transpose_square(lines, STEPS, out + j, PANEL);
                continue;
            }
            for (size p = 0; p < STEPS; p++) {
                if (PAIR * p + 1 < count && columns == PANEL && (j + LANES) % in_64_bytes == 0)
                    for (size i = 0; i < PAIR; i++) __builtin_prefetch(entry(b, column + j + PANEL, k + at + PAIR * p + i), 0, 2);
                const void *below = PAIR * p + 1 < count ? entry(b, column + j, k + at + PAIR * p + 1) : NULL;
                __m512i x = _mm512_setzero_si512();
                if (PAIR * p < count && left)
                    x = pairs_across(entry(b, column + j, k + at + PAIR * p), below, b.floats, left);
                _mm512_store_si512(out + p * PANEL + j, x);
            }
        }
}

/* The rows of a as operands along k: read where they are, if they lie so in memory; else, and the last rows that do not fill a
 * tile, from a copy. */
typedef struct {
    source s;
    size in_place;         /* so many rows are read where they are */
    operand *copy;         /* of the rows after them, from row `top` on, `stride` apart */
    size stride, top, k;   /* the copy begins at number k */
} left;

static left left_of(source s, size m, size n, size deep) {
    size bytes = s.row * (size)sizeof(stored);
    int lies_so = !s.floats && s.column == 1 && s.row % PAIR == 0 && n % PAIR == 0 && (uintptr_t)s.x % sizeof(operand) == 0 &&
                  (bytes % SAME_SETS || m < HIGH);
    /* a line more than the operands: rows that are SAME_SETS apart would displace each other */
    return (left){s, lies_so ? m / HIGH * HIGH : 0, NULL, (deep + NUMBERS - 1) / NUMBERS * STEPS + STEPS, lies_so ? m / HIGH * HIGH : 0, 0};
}

/* Memory for the copy of at most `tall` rows; 0 if there is none */
static int with_copy(left *a, size m, size tall) {
    size rows = m - a->in_place < tall ? m - a->in_place : tall;
    if (!rows) return 1;
    a->copy = (operand *)new_buffer((rows + LANES - 1) / LANES * LANES * a->stride);
    return a->copy != NULL;
}

/* Copy rows from a->top on, shared among the threads; all of them wait for the end */
static void copy_rows(const left *a, size stop, size depth) {
#pragma omp for schedule(static)
    for (size i = a->top; i < stop; i += LANES)
        for (size at = 0; at < depth; at += NUMBERS)
            lines_of(a->s, i, stop - i < LANES ? stop - i : LANES, a->k + at, depth - at, a->copy + (i - a->top) * a->stride + at / PAIR,
                     a->stride);
}

/* A part of a sum: rows of a with their stride, rows of a panel of b, and how many operands along k */
typedef struct { const operand *a; size stride; const operand *b; size steps; } terms;

ALWAYS terms terms_of(const left *a, size i, size k, const operand *panel, size depth) {
    size steps = (depth + PAIR - 1) / PAIR;
    if (i < a->in_place) return (terms){entry(a->s, i, k), a->s.row / PAIR, panel, steps};
    return (terms){a->copy + (i - a->top) * a->stride, a->stride, panel, steps};
}

/* The result: c[i, j] at i·row + j */
typedef struct { void *c; size floats, row, add; const float *bias; } result;

ALWAYS void *target(result c, size i, size j) {
    size at = i * c.row + j;
    return c.floats ? (void *)((float *)c.c + at) : (void *)((stored *)c.c + at);
}

/* A tile of `high` ≤ HIGH rows and `columns` ≤ wide·LANES columns of c, the sum of one or two parts */
ALWAYS void tile(size wide, const terms *part, size parts, size high, size columns, result c) {
    for (size i = 0; i < high; i++) /* c arrives while the sums are computed: a sixth of the time */
        for (size j = 0; j < columns; j += LANES) __builtin_prefetch(target(c, i, j), 1, 2);
    vec sum[HIGH][WIDE];
    UNROLL for (size i = 0; i < HIGH; i++)
        UNROLL for (size v = 0; v < wide; v++) sum[i][v] = (vec){0};
    for (; parts--; part++) {
        const operand *a = part->a, *b = part->b, *a4 = a + 4 * part->stride;
        size stride = part->stride;
        for (size p = 0; p < part->steps; p++, a++, a4++, b += PANEL) {
            operands row[WIDE];
            UNROLL for (size v = 0; v < wide; v++) row[v] = *(const operands *)(b + v * LANES);
            UNROLL for (size i = 0; i < HIGH; i++) {
                operand factor = i < 4 ? a[i * stride] : a4[(i - 4) * stride];
                UNROLL for (size v = 0; v < wide; v++) sum[i][v] = add_product(sum[i][v], factor, row[v]);
            }
        }
    }
    UNROLL for (size i = 0; i < HIGH; i++)
        UNROLL for (size v = 0; v < wide; v++) {
            if (i >= high || v * LANES >= columns) continue;
            __mmask16 mask = (__mmask16)first(columns - v * LANES);
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

/* c (m, w) (+)= a (m, n) b (n, w) + h (m, r) v (r, w) + bias (w); bias may be null, and r 0. A c that is rounded is not added to, and
 * n is at most DEEP. Returns 0 or NO_MEMORY. */
int hg_mixed_product(size m, size w, size n, const void *a, size a_floats, size ar, size ak, const void *b, size b_floats,
                     size bk, size bj, size r, const void *h, size h_floats, size hr, size hk, const void *v, size v_floats,
                     size vk, size vj, const float *bias, void *c, size c_floats, size cs, size add) {
    int failed = 0;
    source right = {b, b_floats, bj, bk}, low_right = {v, v_floats, vj, vk};
    size blocks = (n + DEEP - 1) / DEEP, squares = ((n + blocks - 1) / blocks + NUMBERS - 1) / NUMBERS, deep = squares * NUMBERS;
    size panels = (w + PANEL - 1) / PANEL, tall = m < TALL ? m : TALL, main_panel = squares * STEPS * PANEL;
    left whole = left_of((source){a, a_floats, ar, ak}, m, n, deep), low = left_of((source){h, h_floats, hr, hk}, m, r, r);
    if (!with_copy(&whole, m, tall) || (r && !with_copy(&low, m, m))) {
        free(whole.copy);
        return NO_MEMORY;
    }
#pragma omp parallel if (m * w * n >= (size)1 << 16)
    {
        operand *panel = (operand *)new_buffer(main_panel + (r + NUMBERS - 1) / NUMBERS * STEPS * PANEL);
        if (!panel) {
#pragma omp atomic write
            failed = NO_MEMORY;
        }
        /* few panels, which threads cannot share evenly: each takes some rows of all of them */
        size shares = panels >= 4 * THREADS || panels % THREADS == 0 ? 1 : THREADS;
        left mine = whole;
        if (r && low.in_place < m) copy_rows(&low, m, r);
        for (size k = 0; k < n; k += deep) {
            size depth = n - k < deep ? n - k : deep, last = k + depth == n;
            for (size top = 0; top < m;) {
                size stop = mine.in_place || m - top <= tall ? m : top + tall;
                mine.top = mine.in_place ? mine.in_place : top, mine.k = k;
                if (mine.top < stop) copy_rows(&mine, stop, depth);
                size share = ((stop - top + shares - 1) / shares + HIGH - 1) / HIGH * HIGH;
#pragma omp for schedule(static)
                for (size item = 0; item < panels * shares; item++) {
                    size j = item / shares * PANEL, start = top + item % shares * share, wide = w - j < PANEL ? w - j : PANEL;
                    size end = start + share < stop ? start + share : stop;
                    if (!panel || start >= end) continue;
                    pack_panel(right, j, wide, k, depth, panel);
                    if (r && last) pack_panel(low_right, j, wide, 0, r, panel + main_panel);
                    for (size i = start; i < end; i += HIGH) {
                        terms part[2] = {terms_of(&mine, i, k, panel, depth)};
                        if (r && last) part[1] = terms_of(&low, i, 0, panel + main_panel, r);
                        result out = {target((result){c, c_floats, cs}, i, j), c_floats, cs, add || k, bias && !k ? bias + j : NULL};
                        size high = end - i < HIGH ? end - i : HIGH;
                        if (wide <= LANES) tile(1, part, 1 + (r && last), high, wide, out);
                        else tile(WIDE, part, 1 + (r && last), high, wide, out);
                    }
                }
                top = stop;
            }
        }
        free(panel);
    }
    free(whole.copy);
    free(low.copy);
    return failed;
}
