// Draws the tokens of rows of which all tokens must be weighed: those without filters, and those with top_p first.

#include <stdlib.h>

#include "row.h"
#include "weights.h"

// Of the reach of the candidates for top_p, for a sort by parts.
#define BINS 256
// Candidates whose scaled logits differ by less count as equal.
#define TIE 0x1p-20f
// If rounding may move the border of top_p by a larger share, as where all of a vocabulary is likely, a draw is hardly
// ever sure.
#define MOST_DOUBT 0x1p-9

struct candidate {
    float scaled;
    float weight;
    int32_t id;
    int16_t bin;
    int8_t state;
};

enum { DROPPED, KEPT, UNCERTAIN };

struct near {
    struct candidate all[MOST_CANDIDATES];
    int count;
    double total;
    double bins[BINS];
};

// How far from ``border``, a sum of weights of all ``total``, that of the weights of numpy may be.
static inline double doubt(double border, double total) {
    return 2.0 * (WEIGHT_ROUNDING + NUMPY_ROUNDING) * border * (total - border) / total + 0x1p-100;
}

int32_t caravan_draw_of_all(const struct logits * logits, const struct caravan_row * row, const struct parts * parts) {
    const struct scaling scaling = {parts->highest, (float) row->temperature};
    struct weights weights;
    weigh(logits, &scaling, parts, 0, &weights);
    const double target = row->number * weights.total;
    double sum = 0.0;
    int part = 0;
    for (; part < parts->count && sum + weights.parts[part] <= target; part++) {
        sum += weights.parts[part];
    }
    if (part == parts->count || !(weights.total >= 1.0)) {
        return -1;
    }
    for (int64_t id = part * parts->length, end = end_of(logits, parts, part); id < end; id += LANES) {
        float own[LANES];
        const floats loaded = weights_of(last_logits(logits, id, end), &scaling);
        memcpy(own, &loaded, sizeof own);
        for (int lane = 0; lane < LANES; lane++) {
            const double next = sum + own[lane];
            if (next > target) {
                const int is_sure =
                    target - sum > doubt(sum, weights.total) && next - target > doubt(next, weights.total);
                return is_sure ? (int32_t) (id + lane) : -1;
            }
            sum = next;
        }
    }
    return -1;
}

// Find the tokens at most ``reach`` scaled logits below the highest, in ascending order. Return 0 if they are too many.
static int find_near(const struct logits * logits, const struct scaling * scaling, const struct parts * parts,
                     float reach, struct near * found) {
    const float level = scaling->highest - reach * scaling->temperature;
    found->count = 0;
    found->total = 0.0;
    memset(found->bins, 0, sizeof found->bins);
    for (int part = 0; part < parts->count; part++) {
        if (parts->peaks[part] < level) {
            continue;
        }
        for (int64_t id = part * parts->length, end = end_of(logits, parts, part); id < end; id += LANES) {
            float own[LANES], weights[LANES];
            const floats loaded = last_logits(logits, id, end), weighed = weights_of(loaded, scaling);
            memcpy(own, &loaded, sizeof own);
            memcpy(weights, &weighed, sizeof weights);
            for (int lane = 0; lane < LANES; lane++) {
                if (!(own[lane] >= level)) {
                    continue;
                }
                if (found->count == MOST_CANDIDATES) {
                    return 0;
                }
                const float scaled = (own[lane] - scaling->highest) / scaling->temperature;
                const float bin = -scaled * (BINS / reach);
                struct candidate * candidate = &found->all[found->count++];
                *candidate = (struct candidate) {scaled, weights[lane], (int32_t) (id + lane),
                                                 (int16_t) (bin < BINS ? bin : BINS - 1), DROPPED};
                found->bins[candidate->bin] += weights[lane];
                found->total += weights[lane];
            }
        }
    }
    return 1;
}

static int is_less_likely(const void * one, const void * other) {
    const float left = (*(struct candidate * const *) one)->scaled,
                right = (*(struct candidate * const *) other)->scaled;
    return left < right ? 1 : left > right ? -1 : 0;
}

// Set the states of the candidates: KEPT are those that belong to the fewest likeliest that weigh ``low`` together, and
// UNCERTAIN those that more belong to if they must weigh up to ``high``, or whose order is in doubt.
static void keep_likeliest(struct near * near, double low, double high) {
    // A bin more on either side: a neighbour may be as likely as one at the border.
    int first = 0, last = 0;
    double sum = 0.0, before = 0.0;
    for (; last < BINS - 1 && sum + near->bins[last] < high; last++) {
        sum += near->bins[last];
        first = sum < low ? last : first;
    }
    struct candidate * border[MOST_CANDIDATES];
    int count = 0;
    for (int at = 0; at < near->count; at++) {
        struct candidate * candidate = &near->all[at];
        if (candidate->bin >= first && candidate->bin <= last) {
            border[count++] = candidate;
        } else if (candidate->bin < first) {
            candidate->state = KEPT;
            before += candidate->weight;
        }
    }
    qsort(border, count, sizeof border[0], is_less_likely);
    int lowest = 0, highest = 0;
    for (int at = 0; at < count && before < high; at++) {
        lowest = before < low ? at : lowest;
        highest = at;
        before += border[at]->weight;
    }
    // Equal ones at either border may be kept or not.
    const int has_tie = lowest + 1 < count && border[lowest]->scaled - border[lowest + 1]->scaled < TIE;
    while (has_tie && lowest >= 0 && (lowest == 0 || border[lowest - 1]->scaled - border[lowest]->scaled < TIE)) {
        lowest--;
    }
    lowest -= has_tie && lowest >= 0;
    while (highest + 1 < count && border[highest]->scaled - border[highest + 1]->scaled < TIE) {
        highest++;
    }
    for (int at = 0; at <= highest; at++) {
        border[at]->state = at <= lowest ? KEPT : UNCERTAIN;
    }
}

int32_t caravan_draw_of_likeliest(const struct logits * logits, const struct caravan_row * row,
                                  const struct parts * parts) {
    static const float reaches[] = {3.0f, 6.0f, 10.0f, 15.0f};
    const struct scaling scaling = {parts->highest, (float) row->temperature};
    struct weights weights;
    struct near near;
    weigh(logits, &scaling, parts, 1, &weights);
    // Numpy and llama.cpp add floats one by one. Each addition rounds by at most 2^-24 of the whole, and by no more than
    // what is added: two such sums, one of 128 floats, and the rounding of weights and of what is compared.
    const double rounding = 2.0 * weights.least + 0x1p-17 + 0x1p-19;
    const double low = (row->top_p - rounding) * weights.total, high = (row->top_p + rounding) * weights.total;
    if (!(weights.total >= 1.0) || rounding > MOST_DOUBT) {
        return -1;
    }
    int reach = 0;
    do {
        if (reach == sizeof reaches / sizeof reaches[0] || !find_near(logits, &scaling, parts, reaches[reach], &near)) {
            return -1;
        }
        reach++;
    } while (!(near.total * (1.0 - WEIGHT_ROUNDING) > high));
    keep_likeliest(&near, low, high);

    const double least = row->min_p > 0.0 ? log(row->min_p) : -INFINITY;
    double kept = 0.0, uncertain = 0.0;
    int left = 0;
    for (int at = 0; at < near.count; at++) {
        struct candidate * candidate = &near.all[at];
        const double scaled = (double) candidate->scaled;
        // The highest is never taken away.
        if (candidate->state == DROPPED || scaled == 0.0) {
            // Nothing to compare.
        } else if (row->min_p > 0.0 && fabs(scaled - least) < MIN_P_ROUNDING * fabs(least)) {
            return -1;
        } else if (scaled < least) {
            candidate->state = DROPPED;
        }
        kept += candidate->state == KEPT ? candidate->weight : 0.0;
        uncertain += candidate->state == UNCERTAIN ? candidate->weight : 0.0;
        left += candidate->state != DROPPED;
    }
    // The token must be the same whichever of the uncertain ones are kept, those before it and those behind.
    const double slack = 1.0 + WEIGHT_ROUNDING + NUMPY_ROUNDING;
    double sum = 0.0, before = 0.0;
    for (int at = 0; at < near.count; at++) {
        const struct candidate * candidate = &near.all[at];
        before += candidate->state == UNCERTAIN ? candidate->weight : 0.0;
        if (candidate->state != KEPT) {
            continue;
        }
        const double next = sum + candidate->weight;
        if (next > row->number * kept) {
            const double lowest = row->number * kept - before * slack * (1.0 - row->number);
            const double highest = row->number * (kept + (uncertain - before) * slack);
            const int is_sure = left == 1 || (lowest - sum > doubt(sum, kept) && next - highest > doubt(next, kept));
            return is_sure ? candidate->id : -1;
        }
        sum = next;
    }
    return -1;
}
