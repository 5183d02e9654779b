// What the functions have in common that read rows of logits: the highest of each part of a row.

#pragma once

#include "vectors.h"

// A row with more candidates is left.
#define MOST_CANDIDATES 8192
// A row is searched in parts of adjacent logits.
#define MOST_PARTS 4096
// How many comparisons of LANES logits need not wait for each other.
#define CHAINS 4
#define LONG_PART 128
#define SHORT_PART 64

struct logits {
    const float * values;
    const uint8_t * mask;
    int64_t size;
};

// The highest logit of all, and of each part.
struct parts {
    int64_t length;
    int count;
    float highest;
    float peaks[MOST_PARTS];
};

static inline float logit_at(const struct logits * logits, int64_t id) {
    return !logits->mask || logits->mask[id / 8] >> id % 8 & 1 ? logits->values[id] : -INFINITY;
}

// Return the logits from ``id`` on, which is a multiple of LANES.
static inline floats logits_from(const struct logits * logits, int64_t id) {
    floats loaded = load(logits->values + id);
    if (logits->mask) {
        int32_t bits = logits->mask[id / 8];
#if LANES == 16
        const masks lanes = {1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                             1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
        bits |= logits->mask[id / 8 + 1] << 8;
#elif LANES == 8
        const masks lanes = {1, 1 << 1, 1 << 2, 1 << 3, 1 << 4, 1 << 5, 1 << 6, 1 << 7};
#else
        const masks lanes = {1, 1 << 1, 1 << 2, 1 << 3};
        bits >>= id % 8;
#endif
        const masks kept = (lanes & bits) != 0;
        const floats none = (floats) {0} - INFINITY;
        loaded = (floats) (((masks) loaded & kept) | ((masks) none & ~kept));
    }
    return loaded;
}

// Return the highest logit of the tokens from ``id`` to before ``end``; set ``nan`` if any is NaN, and perhaps if sums
// are, as of both infinities.
static inline float highest_of(const struct logits * logits, int64_t id, int64_t end, masks * nan) {
    floats highest[CHAINS];
    for (int chain = 0; chain < CHAINS; chain++) {
        highest[chain] = (floats) {0} - INFINITY;
    }
    for (; end - id >= CHAINS * LANES; id += CHAINS * LANES) {
        floats sum = {0};
        for (int chain = 0; chain < CHAINS; chain++) {
            const floats loaded = logits_from(logits, id + chain * LANES);
            highest[chain] = higher(highest[chain], loaded);
            sum += loaded;
        }
        *nan |= sum != sum;
    }
    for (int chain = 1; chain < CHAINS; chain++) {
        highest[0] = higher(highest[0], highest[chain]);
    }
    float peak = highest_of_lanes(highest[0]);
    for (; id < end; id++) {
        const float logit = logit_at(logits, id);
        peak = logit > peak ? logit : peak;
        *nan |= (masks) {logit != logit ? -1 : 0};
    }
    return peak;
}

// As highest_of; compiled twice, so that a row without a mask does not look for one at each step.
static inline float highest_between(const struct logits * logits, int64_t id, int64_t end, masks * nan) {
    return logits->mask ? highest_of(logits, id, end, nan)
                        : highest_of(&(struct logits) {logits->values, NULL, logits->size}, id, end, nan);
}

static inline void sink(float * heap, int count, int at) {
    const float value = heap[at];
    for (int child = 2 * at + 1; child < count; at = child, child = 2 * at + 1) {
        if (child + 1 < count && heap[child + 1] < heap[child]) {
            child++;
        }
        if (heap[child] >= value) {
            break;
        }
        heap[at] = heap[child];
    }
    heap[at] = value;
}

// Return the lowest of the ``count`` highest of ``values``, count <= size; ``heap`` has room for them.
static inline float level_of(const float * values, int size, int count, float * heap) {
    for (int at = 0; at < count; at++) {
        heap[at] = values[at];
    }
    for (int at = count / 2 - 1; at >= 0; at--) {
        sink(heap, count, at);
    }
    for (int at = count; at < size; at++) {
        if (values[at] > heap[0]) {
            heap[0] = values[at];
            sink(heap, count, 0);
        }
    }
    return heap[0];
}

static inline int64_t end_of(const struct logits * logits, const struct parts * parts, int part) {
    const int64_t end = (part + 1) * parts->length;
    return end < logits->size ? end : logits->size;
}

// Find the parts of a row of which about ``wanted`` of the highest are wanted. Return 0 if any is NaN, or the highest
// infinite, or if sums of a few overflow to both sides.
static inline int find_parts(const struct logits * logits, double wanted, struct parts * found) {
    // Long parts take less time, and need not be many where few candidates are wanted.
    found->length = logits->size / 4 / LONG_PART > wanted ? LONG_PART : SHORT_PART;
    while (found->length * MOST_PARTS < logits->size) {
        found->length *= 2;
    }
    found->count = (int) ((logits->size + found->length - 1) / found->length);
    masks nan = {0};
    float highest = -INFINITY;
    for (int part = 0; part < found->count; part++) {
        const int64_t start = part * found->length, end = end_of(logits, found, part);
        const float peak = highest_between(logits, start, end, &nan);
        found->peaks[part] = peak;
        highest = peak > highest ? peak : highest;
    }
    found->highest = highest;
    return !is_any(nan) && isfinite(highest);
}
