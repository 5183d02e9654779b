// The weights of the tokens of a row, e to the power of their scaled logits, in sums that are nearly exact.

#pragma once

#include "logits.h"

// A row as it is weighed: each logit relative to the highest, divided by the temperature. As in numpy, both round.
struct scaling {
    float highest;
    float temperature;
};

// The weights of the parts of a row, and of all. Each differs from the exact one by less than a share of WEIGHT_ROUNDING.
struct weights {
    double total;
    double least;  // the sum of weights, of which none counts more than 2^-24
    double parts[MOST_PARTS];
};

// Exponentials are off by less than 1.5 x 2^-24, and two additions in float by 2^-24 each.
#define WEIGHT_ROUNDING 0x1p-22
// Those of numpy are off by less than 3 ulp.
#define NUMPY_ROUNDING 0x1.8p-22

typedef float halves __attribute__((vector_size(LANES / 2 * sizeof(float))));
typedef double doubles __attribute__((vector_size(LANES / 2 * sizeof(double))));

static inline floats weights_of(floats logits, const struct scaling * scaling) {
    floats scaled = logits - scaling->highest;
    if (scaling->temperature != 1.0f) {
        scaled = scaled / scaling->temperature;
    }
    return exponentials(scaled);
}

// Return the logits from ``id`` to before ``end``, -inf behind them.
static inline floats last_logits(const struct logits * logits, int64_t id, int64_t end) {
    float own[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        own[lane] = id + lane < end ? logit_at(logits, id + lane) : -INFINITY;
    }
    return load(own);
}

// The lanes of a sum in double, in two vectors as wide as `floats`.
struct sums {
    doubles low;
    doubles high;
};

static inline void add_lanes(struct sums * sums, floats terms) {
    halves low, high;
    memcpy(&low, &terms, sizeof low);
    memcpy(&high, (const char *) &terms + sizeof low, sizeof high);
    sums->low += __builtin_convertvector(low, doubles);
    sums->high += __builtin_convertvector(high, doubles);
}

static inline double total_of(const struct sums * sums) {
    double lanes[LANES / 2];
    double total = 0.0;
    const doubles both = sums->low + sums->high;
    memcpy(lanes, &both, sizeof lanes);
    for (int lane = 0; lane < LANES / 2; lane++) {
        total += lanes[lane];
    }
    return total;
}

// Weigh a row. ``least``: whether to compute that too.
static inline void weigh_row(const struct logits * logits, const struct scaling * scaling, const struct parts * parts,
                             int least, struct weights * found) {
    const floats most = (floats) {0} + 0x1p-24f;
    struct sums capped = {{0.0}, {0.0}};
    found->total = 0.0;
    for (int part = 0; part < parts->count; part++) {
        const int64_t end = end_of(logits, parts, part);
        struct sums sums = {{0.0}, {0.0}};
        int64_t id = part * parts->length;
        for (; end - id >= 4 * LANES; id += 4 * LANES) {
            floats weights[4];
            for (int at = 0; at < 4; at++) {
                weights[at] = weights_of(logits_from(logits, id + at * LANES), scaling);
            }
            add_lanes(&sums, (weights[0] + weights[1]) + (weights[2] + weights[3]));
            if (least) {
                for (int at = 0; at < 4; at++) {
                    weights[at] = lower(weights[at], most);
                }
                add_lanes(&capped, (weights[0] + weights[1]) + (weights[2] + weights[3]));
            }
        }
        for (; id < end; id += LANES) {
            const floats weights = weights_of(last_logits(logits, id, end), scaling);
            add_lanes(&sums, weights);
            if (least) {
                add_lanes(&capped, lower(weights, most));
            }
        }
        found->parts[part] = total_of(&sums);
        found->total += found->parts[part];
    }
    found->least = total_of(&capped);
}

// As `weigh_row`, compiled twice, so that a row without a mask does not look for one at each step.
static inline void weigh(const struct logits * logits, const struct scaling * scaling, const struct parts * parts,
                         int least, struct weights * found) {
    if (logits->mask) {
        weigh_row(logits, scaling, parts, least, found);
    } else {
        weigh_row(&(struct logits) {logits->values, NULL, logits->size}, scaling, parts, least, found);
    }
}
