// Vectors of the compiler, so that each kind of processor has its own.

#pragma once

#include <math.h>
#include <stdint.h>
#include <string.h>

// Vectors wider than those of the processor make gcc compute element by element.
#if defined(__AVX512F__)
#define LANES 16
#define PROCESSORS(operation) _mm512_##operation
#elif defined(__AVX__)
#define LANES 8
#define PROCESSORS(operation) _mm256_##operation
#else
#define LANES 4
#if defined(__SSE__)
#define PROCESSORS(operation) _mm_##operation
#endif
#endif

#ifdef PROCESSORS
#include <immintrin.h>
#endif

#define HIDDEN __attribute__((visibility("hidden")))
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t masks __attribute__((vector_size(LANES * sizeof(int32_t))));

INLINE floats load(const float * from) {
    floats loaded;
    memcpy(&loaded, from, sizeof loaded);
    return loaded;
}

INLINE void store(float * to, floats stored) { memcpy(to, &stored, sizeof stored); }

// Return the higher of each pair; of ``one`` where ``other`` is NaN.
static inline floats higher(floats one, floats other) {
#ifdef PROCESSORS
    // It returns its second operand where either is NaN, or where both are equal.
    return PROCESSORS(max_ps)(other, one);
#else
    const masks replaces = other > one;
    return (floats) (((masks) other & replaces) | ((masks) one & ~replaces));
#endif
}

static inline floats lower(floats one, floats other) {
#ifdef PROCESSORS
    return PROCESSORS(min_ps)(other, one);
#else
    const masks replaces = other < one;
    return (floats) (((masks) other & replaces) | ((masks) one & ~replaces));
#endif
}

// Return whether any lane of ``mask`` is set; each has all bits set, or none.
static inline int is_any(masks mask) {
#if defined(__AVX__) && LANES == 8
    return _mm256_movemask_ps((floats) mask) != 0;
#elif defined(__SSE__) && LANES == 4
    return _mm_movemask_ps((floats) mask) != 0;
#else
    int32_t lanes[LANES], any = 0;
    memcpy(lanes, &mask, sizeof lanes);
    for (int lane = 0; lane < LANES; lane++) {
        any |= lanes[lane];
    }
    return any != 0;
#endif
}

static inline float highest_of_lanes(floats vector) {
    float lanes[LANES];
    store(lanes, vector);
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int lane = 0; lane < half; lane++) {
            lanes[lane] = lanes[lane + half] > lanes[lane] ? lanes[lane + half] : lanes[lane];
        }
    }
    return lanes[0];
}

// Return e to the power of each of ``powers``, none above 0, off by less than a share of 1.5 x 2^-24; 2^-126 for what
// would be less. The last bits may differ between processors; nothing may depend on those.
static inline floats exponentials(floats powers) {
    const floats least = (floats) {0} - 0x1.5d58ap+6f;
    // Adding it rounds to a whole number, which the lowest bits then are.
    const floats whole = (floats) {0} + 0x1.8p+23f;
    powers = higher(least, powers);
    const floats rounded = powers * 0x1.715476p+0f + whole;
    const floats twos = rounded - whole;
    // The logarithm of 2 in two parts: products with the first are exact.
    const floats rest = (powers - twos * 0x1.63p-1f) + twos * 0x1.bd0106p-13f;
    floats sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = (sum * (rest * rest) + rest) + 1.0f;
    const masks exponents = ((masks) rounded - (masks) whole + 127) << 23;
    return sum * (floats) exponents;
}
