/* What all kernels share: the type they are compiled for, rows in parallel, and exp. */

#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>

typedef REAL real;
typedef long size;

enum { NO_MEMORY = 1, WRONG_TABLE = 2 }; /* what a kernel returns instead of 0; calls.py has the messages */

#define PARALLEL_FROM 16384 /* numbers; below this, waking the other threads costs more than they save */
#define PRAGMA(text) _Pragma(#text)
#define ROWS(count, work) PRAGMA(omp parallel for schedule(static) if ((count) * (work) >= PARALLEL_FROM))

/* The part of `count` items that belongs to the calling thread of a parallel region: consecutive ones, in multiples of `unit`,
 * so that an item is computed in the same way for any number of threads */
static inline void share_of(size count, size unit, size *first, size *end) {
    size units = (count + unit - 1) / unit, threads = omp_get_num_threads(), me = omp_get_thread_num();
    *first = units * me / threads * unit;
    *end = units * (me + 1) / threads * unit;
    if (*end > count) *end = count;
}

/* exp: for float by 2^k · p(r), |r| ≤ ln 2 / 2, which the compiler turns into vector instructions. Error: 1 unit in the last
 * place. Outside −87 … 88 the result is that of the nearest end; NaN stays NaN. */
static inline real exp_(real x) {
    if (sizeof(real) == 8) return (real)exp((double)x);
    float t = (float)x;
    t = t > 88.0f ? 88.0f : t;
    t = t < -87.0f ? -87.0f : t;
    float k = rintf(t * 1.44269504f);
    float r = t - k * 0.693359375f + k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    union { uint32_t i; float f; } whole = {.f = k + 12582912.0f}, two; /* 1.5 · 2²³: the last bits are k; p is NaN if k is */
    two.i = (whole.i + 127) << 23;
    return (real)(p * two.f);
}
