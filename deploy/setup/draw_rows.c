// Draws the tokens of the rows of a step where few candidates are left and filters leave no doubt about them.
//
// The shard's code in numpy draws any row, and decides what a draw is; see caravan_shard/sampling/joint_draw.py. It needs
// some forty calls for a row, which cost more than the work they do. Here the sums are more precise than those of numpy
// and of llama.cpp's filters, which round: wherever that could matter, as with equal logits, a row is left to them. So
// both ways draw the same token.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

// A row with more candidates is left.
#define MOST_CANDIDATES 8192
// A row is searched in parts of adjacent logits.
#define MOST_PARTS 4096
// Logits that are compared together, and how many such comparisons need not wait for each other. Vectors wider than those
// of the processor make gcc compare element by element.
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define CHAINS 4
#define LONG_PART 128
#define SHORT_PART 64

// Must be what caravan_shard/backends/llama/joint_draw.py has.
struct caravan_row {
    int64_t index;         // of the row of logits
    const uint8_t * mask;  // a bit for each token that may be chosen, the lowest bit of a byte first; null for all
    double number;         // in [0, 1): selects the token
    double xtc_threshold;  // infinite without XTC
    double temperature;    // 0: the most likely token
    double top_k;          // 0: off
    double top_p;          // 1: off
    double min_p;          // 0: off
    double reach;          // how far below the highest logit candidates may be, divided by the temperature
};

struct logits {
    const float * values;
    const uint8_t * mask;
    int64_t size;
};

struct candidate {
    float scaled;
    int32_t place;
};

// Sums of n shares in float differ by less than this from the exact ones: each addition rounds by at most 2^-24, and so
// do exponentials and quotients; twice that for safety.
static double share_rounding(int count) { return (count + 8) * 0x1p-23; }

// Scaled logits so near to the border of min_p, as a share of it, may be on either side: 4 ulp.
static const double MIN_P_ROUNDING = 0x1p-21;
// The running sum of float exponentials, each with an error below 3 ulp, is so near to that of exact ones, as a share.
static const double DRAW_ROUNDING = 0x1p-20;

typedef float floats __attribute__((vector_size(LANES * sizeof(float))));
typedef int32_t masks __attribute__((vector_size(LANES * sizeof(int32_t))));

static inline float logit_at(const struct logits * logits, int64_t id) {
    return !logits->mask || logits->mask[id / 8] >> id % 8 & 1 ? logits->values[id] : -INFINITY;
}

// Return the logits from ``id`` on, which is a multiple of LANES.
static inline floats logits_from(const struct logits * logits, int64_t id) {
    floats loaded;
    memcpy(&loaded, logits->values + id, sizeof loaded);
    if (logits->mask) {
        int32_t bits = logits->mask[id / 8];
#if LANES == 16
        const masks lanes = {1, 1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7, 1 << 8,
                             1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
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

// Return the higher of each pair; of ``one`` where ``other`` is NaN.
static inline floats higher(floats one, floats other) {
    const masks replaces = other > one;
    return (floats) (((masks) other & replaces) | ((masks) one & ~replaces));
}

// Return the highest logit of the tokens from ``id`` to before ``end``; set ``nan`` if any is NaN.
static inline float highest_of(const struct logits * logits, int64_t id, int64_t end, masks * nan) {
    float lanes[LANES];
    floats highest[CHAINS];
    for (int chain = 0; chain < CHAINS; chain++) {
        highest[chain] = (floats) {0} - INFINITY;
    }
    for (; end - id >= CHAINS * LANES; id += CHAINS * LANES) {
        for (int chain = 0; chain < CHAINS; chain++) {
            const floats loaded = logits_from(logits, id + chain * LANES);
            highest[chain] = higher(highest[chain], loaded);
            *nan |= loaded != loaded;
        }
    }
    for (int chain = 1; chain < CHAINS; chain++) {
        highest[0] = higher(highest[0], highest[chain]);
    }
    memcpy(lanes, &highest[0], sizeof lanes);
    for (int half = LANES / 2; half > 0; half /= 2) {
        for (int lane = 0; lane < half; lane++) {
            lanes[lane] = lanes[lane + half] > lanes[lane] ? lanes[lane + half] : lanes[lane];
        }
    }
    for (; id < end; id++) {
        const float logit = logit_at(logits, id);
        lanes[0] = logit > lanes[0] ? logit : lanes[0];
        *nan |= (masks) {logit != logit};
    }
    return lanes[0];
}

static void sink(float * heap, int count, int at) {
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
static float level_of(const float * values, int size, int count, float * heap) {
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

static int is_less_likely(const void * one, const void * other) {
    const float left = ((const struct candidate *) one)->scaled, right = ((const struct candidate *) other)->scaled;
    return left < right ? 1 : left > right ? -1 : 0;
}

// Return the token, or -1 if the row is left.
static int32_t draw_row(const struct logits logits, const struct caravan_row * row) {
    const int64_t size = logits.size;
    float peaks[MOST_PARTS];
    float heap[MOST_CANDIDATES];
    int32_t ids[MOST_CANDIDATES];
    struct candidate candidates[MOST_CANDIDATES];
    double weights[MOST_CANDIDATES];

    // Long parts take less time, and need not be many where few candidates are wanted.
    int64_t length = size / 4 / LONG_PART > row->top_k ? LONG_PART : SHORT_PART;
    while (length * MOST_PARTS < size) {
        length *= 2;
    }
    const int parts = (int) ((size + length - 1) / length);
    masks nan = {0};
    float highest = -INFINITY;
    for (int part = 0; part < parts; part++) {
        const int64_t start = part * length;
        const int64_t end = start + length < size ? start + length : size;
        // Compiled twice, so that a row without a mask does not look for one at each step.
        peaks[part] = logits.mask ? highest_of(&logits, start, end, &nan)
                                  : highest_of(&(struct logits) {logits.values, NULL, size}, start, end, &nan);
        highest = peaks[part] > highest ? peaks[part] : highest;
    }
    int32_t is_nan[LANES];
    memcpy(is_nan, &nan, sizeof is_nan);
    for (int lane = 0; lane < LANES; lane++) {
        if (is_nan[lane] || !isfinite(highest)) {
            return -1;
        }
    }

    if (row->temperature == 0.0) {
        for (int part = 0;; part++) {
            for (int64_t id = part * length; peaks[part] == highest; id++) {
                if (logit_at(&logits, id) == highest) {
                    return (int32_t) id;
                }
            }
        }
    }

    // Each logit that the filters may keep reaches the level.
    const float temperature = (float) row->temperature;
    float level = highest - (float) row->reach * temperature;
    const int top_k = row->top_k < MOST_CANDIDATES ? (int) row->top_k : MOST_CANDIDATES;
    if (top_k > 0 && top_k <= parts) {
        const float among_parts = level_of(peaks, parts, top_k, heap);
        level = among_parts > level ? among_parts : level;
    }
    int count = 0;
    for (int part = 0; part < parts; part++) {
        if (peaks[part] < level) {
            continue;
        }
        const int64_t start = part * length, end = start + length < size ? start + length : size;
        float own[LANES];
        for (int64_t id = start; id < end; id += LANES) {
            const int lanes = end - id < LANES ? (int) (end - id) : LANES;
            if (lanes == LANES) {
                const floats loaded = logits_from(&logits, id);
                memcpy(own, &loaded, sizeof own);
            }
            for (int lane = 0; lane < lanes; lane++) {
                const float logit = lanes == LANES ? own[lane] : logit_at(&logits, id + lane);
                if (logit >= level) {
                    if (count == MOST_CANDIDATES) {
                        return -1;
                    }
                    ids[count] = (int32_t) (id + lane);
                    candidates[count].scaled = (logit - highest) / temperature;
                    candidates[count].place = count;
                    count++;
                }
            }
        }
    }

    const int has_xtc = !isinf(row->xtc_threshold);
    int kept = count;
    if (top_k > 0 || row->top_p < 1.0 || has_xtc) {
        qsort(candidates, count, sizeof(struct candidate), is_less_likely);
        kept = top_k > 0 && top_k < count ? top_k : count;
        // Which of equal logits a filter keeps depends on how it sorts.
        for (int at = 1; at < count && at <= kept; at++) {
            if (candidates[at].scaled == candidates[at - 1].scaled) {
                return -1;
            }
        }
    }
    double total = 0.0;
    for (int at = 0; at < kept; at++) {
        weights[at] = exp((double) candidates[at].scaled);
        total += weights[at];
    }
    const double rounding = share_rounding(kept);
    if (row->top_p < 1.0) {
        double sum = 0.0;
        int at = 0;
        for (; at < kept; at++) {
            sum += weights[at];
            if (fabs(sum / total - row->top_p) < rounding) {
                return -1;
            }
            if (sum / total >= row->top_p) {
                break;
            }
        }
        kept = at + 1 < kept ? at + 1 : kept;
    }
    int first = 0;
    if (row->min_p > 0.0) {
        const double least = log(row->min_p);
        int left = 0;
        for (int at = 0; at < kept; at++) {
            const struct candidate candidate = candidates[at];
            const double scaled = (double) candidate.scaled;
            // The highest is never taken away.
            if (scaled != 0.0 && fabs(scaled - least) < MIN_P_ROUNDING * fabs(least)) {
                return -1;
            }
            if (scaled == 0.0 || scaled >= least) {
                candidates[left] = candidate;
                weights[left++] = weights[at];
            }
        }
        kept = left;
    }
    if (has_xtc) {
        // XTC takes the likeliest away, but for the last that reaches the threshold.
        total = 0.0;
        for (int at = 0; at < kept; at++) {
            total += weights[at];
        }
        for (int at = 0; at < kept; at++) {
            if (fabs(weights[at] / total - row->xtc_threshold) < rounding) {
                return -1;
            }
            first = weights[at] / total >= row->xtc_threshold ? at : first;
        }
    }

    // The draw goes by ascending ids, which are those of ascending places.
    double by_place[MOST_CANDIDATES];
    for (int place = 0; place < count; place++) {
        by_place[place] = 0.0;
    }
    total = 0.0;
    for (int at = first; at < kept; at++) {
        by_place[candidates[at].place] = weights[at];
        total += weights[at];
    }
    const double target = row->number * total;
    double sum = 0.0;
    for (int place = 0; place < count; place++) {
        sum += by_place[place];
        if (fabs(sum - target) < total * DRAW_ROUNDING && kept - first > 1) {
            return -1;
        }
        if (sum > target) {
            return ids[place];
        }
    }
    return -1;
}

// Write the token of each of ``rows``, or -1 if it is left. ``logits`` [any, size].
__attribute__((visibility("default"))) void caravan_draw_rows(const float * logits, int64_t size,
                                                              const struct caravan_row * rows, int64_t count,
                                                              int32_t * tokens);

void caravan_draw_rows(const float * logits, int64_t size, const struct caravan_row * rows, int64_t count,
                       int32_t * tokens) {
    for (int64_t at = 0; at < count; at++) {
        const struct logits own = {logits + rows[at].index * size, rows[at].mask, size};
        tokens[at] = draw_row(own, &rows[at]);
    }
}
