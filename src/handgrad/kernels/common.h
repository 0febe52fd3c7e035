/* What all kernels share: the type they are compiled for, rows in parallel, memory, and exp. */

#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef REAL real;
typedef int64_t size;

/* How the operands of products lie in memory: as they are computed with, or rounded to bfloat16, the upper half of a float. Everything
 * else, the sums included, is `real`. Rounded to nearest, ties to even; NaN stays NaN. */
#ifdef MIXED
typedef uint16_t stored;
static inline real wide(stored x) {
    union { uint32_t i; float f; } u = {.i = (uint32_t)x << 16};
    return u.f;
}
static inline stored narrow(real x) {
    union { float f; uint32_t i; } u = {.f = x};
    uint32_t rounded = u.i + 0x7fff + (u.i >> 16 & 1);
    return (stored)(((u.i & 0x7fffffff) > 0x7f800000 ? u.i | 0x400000 : rounded) >> 16);
}
#else
typedef real stored;
static inline real wide(stored x) { return x; }
static inline stored narrow(real x) { return x; }
#endif

/* A function that signatures.py lists. All other names stay inside of the library. */
#define KERNEL __attribute__((visibility("default")))

enum { NO_MEMORY = 1, WRONG_TABLE = 2 }; /* what a kernel returns instead of 0; calls.py has the messages */

/* Declared here because some compilers come without omp.h. clang's library is asked by names that only it has: on Linux that of
 * gcc is loaded as well, by torch, and would answer for its own threads. */
#ifdef __clang__
int __kmpc_bound_num_threads(void *);
int __kmpc_bound_thread_num(void *);
#define THREADS __kmpc_bound_num_threads(NULL)
#define THREAD __kmpc_bound_thread_num(NULL)
#else
int omp_get_num_threads(void);
int omp_get_thread_num(void);
#define THREADS omp_get_num_threads()
#define THREAD omp_get_thread_num()
#endif

/* Uninitialized memory for `count` numbers, or null; to be freed. aligned_alloc requires a multiple of the alignment. */
static inline real *new_buffer(size count) { return aligned_alloc(64, ((size_t)count * sizeof(real) + 64) / 64 * 64); }

#define PARALLEL_FROM 16384 /* numbers; below this, waking the other threads costs more than they save */
#define PRAGMA(text) _Pragma(#text)
#define ROWS(count, work) PRAGMA(omp parallel for schedule(static) if ((count) * (work) >= PARALLEL_FROM))

/* The part of `count` items that belongs to the calling thread of a parallel region: consecutive ones, in multiples of `unit`,
 * so that an item is computed in the same way for any number of threads */
static inline void share_of(size count, size unit, size *first, size *end) {
    size units = (count + unit - 1) / unit, threads = THREADS, me = THREAD;
    *first = units * me / threads * unit;
    *end = units * (me + 1) / threads * unit;
    if (*end > count) *end = count;
}

/* Sums may be reordered (compiler.py). In a block that begins with this clang leaves the order of explicit vectors as it is, which
 * gcc does anyway. */
#ifdef __clang__
#define IN_ORDER _Pragma("clang fp reassociate(off)")
#else
#define IN_ORDER
#endif

/* A product that is not multiplied in another order: a factor of 0 may belong to a huge one. Compilers that do not know the function
 * may give NaN where |x| |y| |z| overflows and x y z does not. */
#ifdef __has_builtin
#if __has_builtin(__builtin_assoc_barrier)
#define FIRST(x) __builtin_assoc_barrier(x)
#endif
#endif
#ifndef FIRST
#define FIRST(x) (x)
#endif

/* e^x = (1 + p) · two for float, with p = e^r − 1, |r| ≤ ln 2 / 2, and two = 2^k: what the compiler turns into vector
 * instructions. Outside −87 … 88 the result is that of the nearest end; NaN stays NaN. */
typedef struct { float p, two; } power;
static inline power power_of_e(float t) {
    t = t > 88.0f ? 88.0f : t;
    t = t < -87.0f ? -87.0f : t;
    float k = rintf(t * 1.44269504f);
    union { uint32_t i; float f; } whole = {.f = k + 12582912.0f}, two; /* 1.5 · 2²³: the last bits are k; p is NaN if k is */
    float r = t - k * 0.693359375f; /* k ln 2 in two parts, the first exact; joined by a compiler, exact in one fused operation */
#if !defined(__FMA__) && !defined(__aarch64__)
    union { float f; uint32_t i; } first = {.f = r};
    first.i += whole.i >> 31; /* 0, which no compiler knows: it must not join the parts, where the product would be rounded */
    r = first.f;
#endif
    r += k * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    two.i = (whole.i + 127) << 23;
    return (power){p * r * r + r, two.f};
}

/* exp; error for float: 1 unit in the last place */
static inline real exp_(real x) {
    if (sizeof(real) == 8) return (real)exp((double)x);
    power e = power_of_e((float)x);
    return (real)((e.p + 1.0f) * e.two);
}

/* tanh x = y / (y + 2), y = e^2x − 1, without cancellation; relative error for float: 4 units in the last place */
static inline real tanh_(real x) {
    if (sizeof(real) == 8) return (real)tanh((double)x);
    power e = power_of_e(2 * (float)x);
    float y = e.two == 1.0f ? e.p : (e.p + 1.0f) * e.two - 1.0f; /* small numbers have no 1 to lose */
    return (real)(y / (y + 2.0f));
}

/* tanh of a score divided by its cap; a sum that overflowed has no sign to rely on, and stays no number */
static inline real tanh_of_score(real x) { return x > -(real)INFINITY && x < (real)INFINITY ? tanh_(x) : (real)NAN; }

/* c tanh(x/c) of `count` numbers: capped scores, of which none is beyond ±c */
static inline void cap_scores(size count, real *restrict x, double scale, double cap) {
    real factor = (real)(scale / cap), c = (real)cap;
    for (size i = 0; i < count; i++) x[i] = c * tanh_of_score(factor * x[i]);
}
