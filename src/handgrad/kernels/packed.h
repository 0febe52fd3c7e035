/* What packed.c and rounded.c share: they read the same blocks. */

#pragma once

#include <stdint.h>

#if defined(__F16C__) || defined(__AVX2__)
#include <immintrin.h>
#endif

#define PER_BLOCK 32
#define INLINE static inline __attribute__((always_inline))

/* a float16; exponent and fraction move to their places in a float, whose exponent is larger by 112 */
INLINE float half(const uint8_t *x) {
    uint32_t h = (uint32_t)x[0] | (uint32_t)x[1] << 8;
#ifdef __F16C__
    return _cvtsh_ss((unsigned short)h);
#else
    union { uint32_t i; float f; } u = {.i = (h & 0x7fff) << 13}, largest = {.i = 0x7f800000};
    u.f *= 0x1p112f;
    if ((h & 0x7c00) == 0x7c00) u.i |= largest.i; /* infinity, NaN */
    u.i |= (h & 0x8000) << 16;
    return u.f;
#endif
}

INLINE int64_t block_bytes(int kind) {
    return kind == 0 ? 34 : kind == 1 ? 18 : kind == 2 ? 20 : kind == 9 ? 17 : 64;
}
