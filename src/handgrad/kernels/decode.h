/* Functions of decode.c, packed.c and rounded.c. One whose name ends in _part is called by all threads of a parallel region, and
 * computes the outputs, or heads, of the calling thread. */

#pragma once

#include "common.h"

#define MANY 16 /* most rows of the next two */

/* a (n, f_in) → aᵗ (f_in, MANY), filled with 0 */
void turn_part(size n, size f_in, const real *a, size as, real *turned);

/* a (n, f_in), w (f_out, f_in) → a wᵗ (n, f_out). `turned`, 64-byte aligned, is needed for more than MANY / 2 rows. */
void few_rows_part(size n, size f_in, size f_out, const real *a, size as, const real *turned, const real *w, size ws, real *out,
                   size os);

/* a (n, f_in), w (f_in, f_out) → a w (n, f_out), in strips of columns */
void few_rows_in_out_part(size n, size f_in, size f_out, const real *a, size as, const real *w, size ws, real *out, size os);

/* a (n, f_in), w packed → a wᵗ (n, f_out); float, whatever REAL is */
void packed_product_part(size kind, size n, size f_in, size f_out, const float *a, size as, const uint8_t *w, float *out,
                         size os);

/* a (n, f_in) rounded to 8 bits, in `rounded_size` numbers, 64-byte aligned; then its product with packed w */
typedef struct group group;
size rounded_size(size n, size f_in);
void round_part(size n, size f_in, const float *a, size as, group *out);
void rounded_product_part(size kind, size n, size f_in, size f_out, const group *a, const uint8_t *w, float *out, size os);

/* Heads of queries, `share` of them to one head of keys and values; widths of keys and values. `cap` 0: none; `sinks`: a score
 * without a key for every head, or null */
typedef struct { size heads, share, d, dv, window; double scale, cap; const real *sinks; } heads;

/* Attention of one new token of each of n sequences to cached keys. places (n, 6): addresses of the keys and of the values of
 * block 0, numbers between two blocks of each, capacity, and the position of the new token. A head's keys follow each other.
 * q, out (n, heads, …), k, v (n, heads / share, …), with the strides of rows and heads. Softmax online, in groups of keys.
 * Store the new keys and values first. */
int wrong_places(size n, const int64_t *places); /* whether a position is outside of its capacity */
void store_tokens(const heads *x, size n, size block, const int64_t *places, const real *k, size ks, size kh, const real *v,
                  size vs, size vh);
void attend_tokens_part(const heads *x, size n, size block, const int64_t *places, const real *q, size qs, size qh, real *out,
                        size os, size oh);
