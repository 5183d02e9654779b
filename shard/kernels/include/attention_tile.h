// The products of attention for a tile: some rows of queries and a block of cells, all in floats.
//
// Each number is summed in an order that does not depend on the other rows of the tile.

#pragma once

#include "vectors.h"

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

// The most rows of a tile, and the most cells of a block: with their scores, they fit into the first cache of a core.
#define TILE_ROWS 24
#define BLOCK_CELLS 64
// The number of keys of a block is rounded up to a multiple of this, which is one of LANES.
#define KEYS_STEP 16
// Rows that share what is loaded of a block, so few that their sums fit into the registers.
#define JOINT_ROWS 3

// Loops over sums are unrolled, so that these stay in registers.
#if defined(__clang__)
#define UNROLLED _Pragma("unroll")
#else
#define UNROLLED _Pragma("GCC unroll 8")
#endif

typedef float quads __attribute__((vector_size(4 * sizeof(float))));

struct tile {
    int64_t rows;
    int64_t key_size;    // floats of a query and of a key, a multiple of LANES
    int64_t value_size;  // floats of a value, likewise
    float * queries;     // [rows][key_size]
    float * scores;      // [rows][BLOCK_CELLS]; then weights
    float * sums;        // [rows][sums_size]
};

// What a row has of its cells so far: at HIGHEST the highest score, at TOTAL the sum of the weights relative to it, and
// from VALUES on the sum of the weighted values.
enum { HIGHEST = 0, TOTAL = 1, VALUES = LANES };

static inline int64_t sums_size(const struct tile * tile) { return VALUES + tile->value_size; }

// Whether there is an instruction that converts LANES halves to floats.
#if defined(__F16C__) || (defined(__ARM_NEON) && defined(__aarch64__))
#define HAS_HALVES 1
#else
#define HAS_HALVES 0
#endif

INLINE floats load_halves(const uint16_t * at) {
#if defined(__F16C__) && LANES == 16
    return (floats) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *) at));
#elif defined(__F16C__)
    return (floats) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *) at));
#elif HAS_HALVES
    return (floats) vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at)));
#else
    (void) at;
    return (floats) {0};
#endif
}

// The keys or values of a block: either floats, one vector after another, or halves anywhere.
struct block {
    int64_t size;
    const float * floats;
    const uint16_t * const * halves;
};

INLINE floats load_from(const struct block * block, int64_t cell, int64_t at, const int are_halves) {
    return are_halves ? load_halves(block->halves[cell] + at) : load(block->floats + cell * block->size + at);
}

#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
#define PICK(one, other, ...) __builtin_shufflevector(one, other, __VA_ARGS__)
#else
#define PICK(one, other, ...) __builtin_shuffle(one, other, (masks) {__VA_ARGS__})
#endif

// Return, in each quarter of four lanes, the sums of the pairs in that quarter of ``one``, then of ``other``.
INLINE floats pairs_of(floats one, floats other) {
#if LANES == 16
    return PICK(one, other, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           PICK(one, other, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
#elif LANES == 8
    return PICK(one, other, 0, 2, 8, 10, 4, 6, 12, 14) + PICK(one, other, 1, 3, 9, 11, 5, 7, 13, 15);
#else
    return PICK(one, other, 0, 2, 4, 6) + PICK(one, other, 1, 3, 5, 7);
#endif
}

// Return the sums over the lanes of four vectors.
INLINE quads sums_of(const floats * vectors) {
    const floats pairs = pairs_of(pairs_of(vectors[0], vectors[1]), pairs_of(vectors[2], vectors[3]));
    quads quarters[LANES / 4];
    memcpy(quarters, &pairs, sizeof quarters);
    for (int quarter = 1; quarter < LANES / 4; quarter++) {
        quarters[0] += quarters[quarter];
    }
    return quarters[0];
}

// Multiply the queries of ``rows`` by ``cells`` keys, a multiple of 4, from ``cell`` on.
INLINE void score(const struct tile * tile, const struct block * keys, int64_t row, int64_t cell, const int rows,
                  const int cells, const int are_halves) {
    const int64_t size = tile->key_size;
    const float * queries = tile->queries + row * size;
    float * scores = tile->scores + row * BLOCK_CELLS + cell;
    floats sums[JOINT_ROWS][8] = {0};
    for (int64_t at = 0; at < size; at += LANES) {
        UNROLLED
        for (int key = 0; key < cells; key++) {
            const floats loaded = load_from(keys, cell + key, at, are_halves);
            UNROLLED
            for (int other = 0; other < rows; other++) {
                sums[other][key] += load(queries + other * size + at) * loaded;
            }
        }
    }
    UNROLLED
    for (int other = 0; other < rows; other++) {
        UNROLLED
        for (int key = 0; key < cells; key += 4) {
            const quads four = sums_of(&sums[other][key]);
            memcpy(scores + other * BLOCK_CELLS + key, &four, sizeof four);
        }
    }
}

INLINE void score_rows(const struct tile * tile, const struct block * keys, int64_t count, int64_t row, const int rows,
                       const int are_halves) {
    const int cells = rows == 1 ? 8 : 4;
    for (int64_t cell = 0; cell < count; cell += cells) {
        score(tile, keys, row, cell, rows, cells, are_halves);
    }
}

INLINE void score_all(const struct tile * tile, const struct block * keys, int64_t count, const int are_halves) {
    int64_t row = 0;
    for (; row + JOINT_ROWS <= tile->rows; row += JOINT_ROWS) {
        score_rows(tile, keys, count, row, JOINT_ROWS, are_halves);
    }
    if (row + 2 <= tile->rows) {
        score_rows(tile, keys, count, row, 2, are_halves);
    } else if (row < tile->rows) {
        score_rows(tile, keys, count, row, 1, are_halves);
    }
}

// Set the scores for ``count`` keys, a multiple of KEYS_STEP.
static void score_block(const struct tile * tile, const struct block * keys, int64_t count) {
    if (keys->halves) {
        score_all(tile, keys, count, 1);
    } else {
        score_all(tile, keys, count, 0);
    }
}

static float sum_of_lanes(floats vector) {
    float lanes[LANES];
    store(lanes, vector);
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int lane = 0; lane < half; lane++) {
            lanes[lane] += lanes[lane + half];
        }
    }
    return lanes[0];
}

// Turn ``count`` scores of a row, a multiple of KEYS_STEP, into weights relative to its highest score so far.
static void weigh_row(const struct tile * tile, int64_t row, int64_t count) {
    float * scores = tile->scores + row * BLOCK_CELLS;
    float * sums = tile->sums + row * sums_size(tile);
    floats peaks = load(scores);
    for (int64_t at = LANES; at < count; at += LANES) {
        peaks = higher(peaks, load(scores + at));
    }
    const float peak = highest_of_lanes(peaks);
    if (peak == -INFINITY) {
        memset(scores, 0, (size_t) count * sizeof *scores);
        return;
    }
    if (peak > sums[HIGHEST]) {
        const float factor = expf(sums[HIGHEST] - peak);
        sums[HIGHEST] = peak;
        sums[TOTAL] *= factor;
        for (int64_t at = VALUES; at < sums_size(tile); at += LANES) {
            store(sums + at, load(sums + at) * factor);
        }
    }
    // Products with less than this share are denormal, which is slow, and change nothing.
    const floats least = (floats) {0} - 80.0f;
    floats total = {0};
    for (int64_t at = 0; at < count; at += LANES) {
        const floats power = load(scores + at) - sums[HIGHEST];
        const floats weight = (floats) ((masks) exponentials(power) & (power > least));
        store(scores + at, weight);
        total += weight;
    }
    sums[TOTAL] += sum_of_lanes(total);
}

// Add ``count`` weighted values to ``width`` vectors of the sums of ``rows``, from ``at`` on.
INLINE void add_vectors(const struct tile * tile, const struct block * values, int64_t count, int64_t row, int64_t at,
                        const int rows, const int width, const int are_halves) {
    const int64_t size = sums_size(tile);
    const float * weights = tile->scores + row * BLOCK_CELLS;
    float * sums = tile->sums + row * size + VALUES + at;
    floats own[JOINT_ROWS][8];
    UNROLLED
    for (int other = 0; other < rows; other++) {
        UNROLLED
        for (int vector = 0; vector < width; vector++) {
            own[other][vector] = load(sums + other * size + vector * LANES);
        }
    }
    for (int64_t cell = 0; cell < count; cell++) {
        UNROLLED
        for (int vector = 0; vector < width; vector++) {
            const floats value = load_from(values, cell, at + vector * LANES, are_halves);
            UNROLLED
            for (int other = 0; other < rows; other++) {
                own[other][vector] += weights[other * BLOCK_CELLS + cell] * value;
            }
        }
    }
    UNROLLED
    for (int other = 0; other < rows; other++) {
        UNROLLED
        for (int vector = 0; vector < width; vector++) {
            store(sums + other * size + vector * LANES, own[other][vector]);
        }
    }
}

INLINE void add_to_rows(const struct tile * tile, const struct block * values, int64_t count, int64_t row,
                        const int rows, const int are_halves) {
    const int64_t size = tile->value_size;
    int64_t at = 0;
    for (; rows == 1 && at + 8 * LANES <= size; at += 8 * LANES) {
        add_vectors(tile, values, count, row, at, rows, 8, are_halves);
    }
    for (; at + 4 * LANES <= size; at += 4 * LANES) {
        add_vectors(tile, values, count, row, at, rows, 4, are_halves);
    }
    for (; at + 2 * LANES <= size; at += 2 * LANES) {
        add_vectors(tile, values, count, row, at, rows, 2, are_halves);
    }
    if (at < size) {
        add_vectors(tile, values, count, row, at, rows, 1, are_halves);
    }
}

INLINE void add_all(const struct tile * tile, const struct block * values, int64_t count, const int are_halves) {
    int64_t row = 0;
    for (; row + JOINT_ROWS <= tile->rows; row += JOINT_ROWS) {
        add_to_rows(tile, values, count, row, JOINT_ROWS, are_halves);
    }
    if (row + 2 <= tile->rows) {
        add_to_rows(tile, values, count, row, 2, are_halves);
    } else if (row < tile->rows) {
        add_to_rows(tile, values, count, row, 1, are_halves);
    }
}

// Add ``count`` weighted values to the sums of all rows.
static void add_block(const struct tile * tile, const struct block * values, int64_t count) {
    if (values->halves) {
        add_all(tile, values, count, 1);
    } else {
        add_all(tile, values, count, 0);
    }
}
