/* Matrix products c = a b, c = bias + a b or c += a b, for processors on which the library of torch is slower than this.
 *
 * c is computed in panels as wide as a tile. The rows of b that a panel needs are copied side by side, and the columns of a
 * too if a is stored by columns, so that a tile reads contiguous memory. A tile belongs to one thread and is summed in one
 * order, so a result does not depend on the number of threads. */

#include <string.h>

#include "kernels.h"
#include "tiles.h"

#define PANEL (WIDE * LANES)
#define DEEP 512  /* columns of a and rows of b at once: a panel of b stays in the cache */
#define TALL 2048 /* rows of a at once */

/* n rows and w ≤ PANEL columns of b, b[k, j] at b[k·bk + j·bj], into rows of PANEL numbers, padded with 0 */
static void pack_panel(size n, size w, const real *b, size bk, size bj, real *out) {
    size k = 0;
    if (w < PANEL) memset(out, 0, n * PANEL * sizeof(real));
    if (bj == 1)
        for (; k < n; k++) memcpy(out + k * PANEL, b + k * bk, w * sizeof(real));
    else if (bk == 1 && w == PANEL)
        for (; k + LANES <= n; k += LANES)
            for (size j = 0; j < PANEL; j += LANES) transpose_square(b + k + j * bj, bj, out + k * PANEL + j, PANEL);
    for (; k < n; k++)
        for (size j = 0; j < w; j++) out[k * PANEL + j] = b[k * bk + j * bj];
}

/* n columns and h ≤ HIGH rows of a, into columns of HIGH numbers, padded with 0 */
static void pack_strip(size n, size h, const real *a, size ar, size ak, real *out) {
    for (size k = 0; k < n; k++)
        for (size i = 0; i < HIGH; i++) out[k * HIGH + i] = i < h ? a[i * ar + k * ak] : 0;
}

/* One tile: h ≤ HIGH rows and w ≤ PANEL columns of c */
static void tile(size n, size h, size w, const real *a, size ar, size ak, const real *b, const real *bias, real *c, size cs,
                 int add) {
    if (bias) {
        for (size i = 0; i < h; i++) memcpy(c + i * cs, bias, w * sizeof(real));
        add = 1;
    }
    if (h == HIGH && w == PANEL) {
        micro(WIDE, n, a, ar, ak, b, PANEL, c, cs, add);
        return;
    }
    real whole[HIGH * PANEL];
    micro(WIDE, n, a, ar, ak, b, PANEL, whole, PANEL, 0);
    for (size i = 0; i < h; i++)
        for (size j = 0; j < w; j++) c[i * cs + j] = (add ? c[i * cs + j] : 0) + whole[i * PANEL + j];
}

/* c (m, w) (+)= a (m, n) b (n, w); bias (w) or null. Returns 0 or NO_MEMORY. */
int hg_product(size m, size w, size n, const real *a, size ar, size ak, const real *b, size bk, size bj, const real *bias,
               real *c, size cs, size add) {
    int by_columns = ar == 1 && ak != 1, failed = 0;
    size deep = n < DEEP ? n : DEEP, panels = (w + PANEL - 1) / PANEL;
    size part = panels < 8 ? 256 : TALL; /* rows of one item of work: with few panels, several threads share one */
    real *strips = by_columns ? new_buffer(TALL * deep) : NULL;
    if (by_columns && !strips) return NO_MEMORY;
#pragma omp parallel
    {
        real *panel = new_buffer(deep * (PANEL + HIGH)), *edge = panel ? panel + deep * PANEL : NULL;
        if (!panel) {
#pragma omp atomic write
            failed = NO_MEMORY;
        }
        for (size k = 0; k < n; k += deep) {
            size depth = n - k < deep ? n - k : deep;
            for (size first = 0; first < m; first += TALL) {
                size rows = m - first < TALL ? m - first : TALL, parts = (rows + part - 1) / part;
                if (by_columns) {
#pragma omp for schedule(static)
                    for (size i = 0; i < rows; i += HIGH)
                        pack_strip(depth, rows - i < HIGH ? rows - i : HIGH, a + (first + i) * ar + k * ak, ar, ak,
                                   strips + i * depth);
                }
#pragma omp for schedule(static)
                for (size item = 0; item < panels * parts; item++) {
                    size j = item / parts * PANEL, start = item % parts * part, wide = w - j < PANEL ? w - j : PANEL;
                    size stop = start + part < rows ? start + part : rows;
                    if (!panel) continue;
                    pack_panel(depth, wide, b + k * bk + j * bj, bk, bj, panel);
                    for (size i = start; i < stop; i += HIGH) {
                        size high = stop - i < HIGH ? stop - i : HIGH;
                        const real *left = a + (first + i) * ar + k * ak;
                        size left_row = ar, left_column = ak;
                        if (by_columns) {
                            left = strips + i * depth, left_row = 1, left_column = HIGH;
                        } else if (high < HIGH) {
                            pack_strip(depth, high, left, ar, ak, edge);
                            left = edge, left_row = 1, left_column = HIGH;
                        }
                        tile(depth, high, wide, left, left_row, left_column, panel, k ? NULL : bias ? bias + j : NULL,
                             c + (first + i) * cs + j, cs, add || k);
                    }
                }
            }
        }
        free(panel);
    }
    free(strips);
    return failed;
}
