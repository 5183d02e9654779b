// Numbers for the programs in this folder: the same ones from the same seed, on every host.

#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

static uint64_t random_state = 1;

static uint64_t next_random(void) {
    random_state += UINT64_C(0x9e3779b97f4a7c15);
    uint64_t mixed = random_state;
    mixed = (mixed ^ (mixed >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    mixed = (mixed ^ (mixed >> 27)) * UINT64_C(0x94d049bb133111eb);
    return mixed ^ (mixed >> 31);
}

// Return a number from 0 to before ``count``.
static inline int64_t below(int64_t count) { return (int64_t) (next_random() % (uint64_t) count); }

// Return a number in [0, 1).
static inline double unit(void) { return (double) (next_random() >> 11) * 0x1p-53; }

// Return a number that is about normally distributed.
static inline float normal(void) {
    double sum = -6.0;
    for (int term = 0; term < 12; term++) {
        sum += unit();
    }
    return (float) sum;
}

#define ANY_OF(values) (values)[below((int64_t) (sizeof(values) / sizeof *(values)))]

// Return memory of exactly this size, all 0, so that a sanitizer sees what is read or written behind it.
static inline void * room(size_t bytes) {
    void * memory = calloc(1, bytes);
    if (!memory) {
        abort();
    }
    return memory;
}

#define CHECK(holds, ...)                                                                                              \
    do {                                                                                                               \
        if (!(holds)) {                                                                                                \
            fprintf(stderr, "wrong: " __VA_ARGS__);                                                                    \
            fprintf(stderr, "\n");                                                                                     \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)
