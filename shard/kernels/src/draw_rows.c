// Draws the tokens of the rows of a step where few candidates are left and filters leave no doubt about them.
//
// The shard's code in numpy draws any row, and decides what a draw is; see caravan_shard/sampling/joint_draw.py. It needs
// some forty calls for a row, which cost more than the work they do. Here the sums are more precise than those of numpy
// and of llama.cpp's filters, which round: wherever that could matter, as with equal logits, a row is left to them. So
// both ways draw the same token.

#include <stdlib.h>

#include "row.h"

// Where one logit is wanted alone, pieces may be long: their highest logits are compared one by one.
#define LONG_PIECE 512

struct candidate {
    float scaled;
    int32_t place;
};

// Sums of n shares in float differ by less than this from the exact ones: each addition rounds by at most 2^-24, and so
// do exponentials and quotients; twice that for safety.
static double share_rounding(int count) { return (count + 8) * 0x1p-23; }

// Surprises of up to 36 and their mean, in floats, are off by less than this for each candidate: each is off by 2^-18 at
// most, and the mean by the rounding of as many additions.
static const double SURPRISE_ROUNDING = 0x1p-17;
// The running sum of float exponentials, each with an error below 3 ulp, is so near to that of exact ones, as a share.
static const double DRAW_ROUNDING = 0x1p-20;

struct surprise {
    double distance;  // from the mean surprise
    int place;
};

static int is_less_typical(const void * one, const void * other) {
    const double left = ((const struct surprise *) one)->distance, right = ((const struct surprise *) other)->distance;
    return left > right ? 1 : left < right ? -1 : 0;
}

static int is_less_likely(const void * one, const void * other) {
    const float left = ((const struct candidate *) one)->scaled, right = ((const struct candidate *) other)->scaled;
    return left < right ? 1 : left > right ? -1 : 0;
}

// Keep those of ``count`` candidates, at least one, whose surprise is nearest to its mean and that together are more than
// ``typical_p`` likely. Return how many are left, or -1 in doubt.
static int keep_typical(struct candidate * candidates, double * weights, int count, double typical_p) {
    struct surprise surprises[MOST_CANDIDATES];
    uint8_t is_kept[MOST_CANDIDATES] = {0};
    double total = 0.0, mean = 0.0, sum = 0.0;
    for (int at = 0; at < count; at++) {
        total += weights[at];
        mean -= weights[at] * (double) candidates[at].scaled;
    }
    mean /= total;
    for (int at = 0; at < count; at++) {
        surprises[at] = (struct surprise) {fabs(-(double) candidates[at].scaled - mean), at};
    }
    qsort(surprises, count, sizeof(struct surprise), is_less_typical);
    int most = 0;
    while (most < count && sum / total <= typical_p) {
        sum += weights[surprises[most].place];
        if (fabs(sum / total - typical_p) < share_rounding(count)) {
            return -1;
        }
        is_kept[surprises[most++].place] = 1;
    }
    if (most < count && surprises[most].distance - surprises[most - 1].distance < SURPRISE_ROUNDING * (1 + count)) {
        return -1;
    }
    int left = 0;
    for (int at = 0; at < count; at++) {
        if (is_kept[at]) {
            candidates[left] = candidates[at];
            weights[left++] = weights[at];
        }
    }
    return left;
}

// Return the first of the likeliest tokens.
static int32_t most_likely(const struct logits * logits) {
    masks nan = {0};
    float highest = -INFINITY;
    int64_t id = 0;
    for (int64_t start = 0; start < logits->size; start += LONG_PIECE) {
        const int64_t end = start + LONG_PIECE < logits->size ? start + LONG_PIECE : logits->size;
        const float peak = highest_between(logits, start, end, &nan);
        if (peak > highest) {
            highest = peak;
            id = start;
        }
    }
    if (is_any(nan) || !isfinite(highest)) {
        return -1;
    }
    while (logit_at(logits, id) != highest) {
        id++;
    }
    return (int32_t) id;
}

static int32_t draw_of_few(const struct logits * logits, const struct caravan_row * row, const struct parts * parts) {
    float heap[MOST_CANDIDATES];
    int32_t ids[MOST_CANDIDATES];
    struct candidate candidates[MOST_CANDIDATES];
    double weights[MOST_CANDIDATES];

    // Each logit that the filters may keep reaches the level.
    const float temperature = (float) row->temperature, highest = parts->highest;
    float level = highest - (float) row->reach * temperature;
    const int top_k = row->top_k < MOST_CANDIDATES ? (int) row->top_k : MOST_CANDIDATES;
    if (top_k > 0 && top_k <= parts->count) {
        const float among_parts = level_of(parts->peaks, parts->count, top_k, heap);
        level = among_parts > level ? among_parts : level;
    }
    int count = 0;
    for (int part = 0; part < parts->count; part++) {
        if (parts->peaks[part] < level) {
            continue;
        }
        const int64_t start = part * parts->length, end = end_of(logits, parts, part);
        float own[LANES];
        for (int64_t id = start; id < end; id += LANES) {
            const int lanes = end - id < LANES ? (int) (end - id) : LANES;
            if (lanes == LANES) {
                const floats loaded = logits_from(logits, id);
                if (!is_any(loaded >= level)) {
                    continue;
                }
                store(own, loaded);
            }
            for (int lane = 0; lane < lanes; lane++) {
                const float logit = lanes == LANES ? own[lane] : logit_at(logits, id + lane);
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
    // The highest weighs 1, unless the temperature is 0 as a float.
    if (!(total >= 1.0)) {
        return -1;
    }
    const double rounding = share_rounding(kept);
    if (row->typical_p < 1.0) {
        kept = keep_typical(candidates, weights, kept, row->typical_p);
        if (kept < 0) {
            return -1;
        }
        total = 0.0;
        for (int at = 0; at < kept; at++) {
            total += weights[at];
        }
    }
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

static int32_t draw_row(const struct logits * logits, const struct caravan_row * row) {
    if (row->temperature == 0.0) {
        return most_likely(logits);
    }
    struct parts parts;
    if (!find_parts(logits, row->top_k, &parts)) {
        return -1;
    }
    if (row->top_k > 0.0 || (row->min_p > 0.0 && row->top_p >= 1.0)) {
        return draw_of_few(logits, row, &parts);
    }
    if (!isinf(row->xtc_threshold)) {
        return -1;
    }
    return row->top_p < 1.0 ? caravan_draw_of_likeliest(logits, row, &parts) : caravan_draw_of_all(logits, row, &parts);
}

// Rows of fewer logits together are searched sooner than other threads wake up. With musl, those of OpenMP have too small
// a stack for the candidates of a row.
#if defined(_OPENMP) && defined(__GLIBC__)
#define LOGITS_OF_THREADS (1 << 19)
#endif

// Write the token of each of ``rows``, or -1 if it is left. ``logits`` [any, size]. Up to ``threads`` share the rows.
__attribute__((visibility("default"))) void caravan_choose_tokens(const float * logits, int64_t size,
                                                                  const struct caravan_row * rows, int64_t count,
                                                                  int32_t * tokens, int64_t threads);

void caravan_choose_tokens(const float * logits, int64_t size, const struct caravan_row * rows, int64_t count,
                           int32_t * tokens, int64_t threads) {
#ifdef LOGITS_OF_THREADS
    const int is_shared = threads > 1 && count > 1 && count * size >= LOGITS_OF_THREADS;
#pragma omp parallel for num_threads((int) threads) schedule(static, 1) if (is_shared)
#else
    (void) threads;
#endif
    for (int64_t at = 0; at < count; at++) {
        const struct logits own = {logits + rows[at].index * size, rows[at].mask, size};
        tokens[at] = draw_row(&own, &rows[at]);
    }
}
