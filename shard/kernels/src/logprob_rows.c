// Computes log probabilities of rows of logits: of one token, and of the likeliest.
//
// They differ from the exact ones by less than 2^-19. The shard's code in numpy computes those of any row, and rounds more;
// see caravan_shard/sampling/logprobs.py.

#include <stdlib.h>

#include "weights.h"

// Must be what caravan_shard/backends/llama/kernels/joint_logprobs.py has.
struct caravan_logprob_row {
    int64_t index;  // of the row of logits
    int64_t token;
    int64_t count;  // how many of the likeliest are wanted, at most as many as there are tokens
};

struct likely {
    float logit;
    int32_t id;
};

static int is_behind(const void * one, const void * other) {
    const struct likely *left = one, *right = other;
    if (left->logit != right->logit) {
        return left->logit < right->logit ? 1 : -1;
    }
    return (left->id > right->id) - (left->id < right->id);
}

// Write the ``count`` likeliest tokens in falling order, equal ones by id. Return 0 if there are too many candidates.
static int find_likeliest(const struct logits * logits, const struct parts * parts, int64_t count, int32_t * ids) {
    float heap[MOST_CANDIDATES];
    struct likely found[MOST_CANDIDATES];
    if (count <= 0) {
        return 1;
    }
    if (count > MOST_CANDIDATES || count > logits->size) {
        return 0;
    }
    const float level = count <= parts->count ? level_of(parts->peaks, parts->count, (int) count, heap) : -INFINITY;
    int candidates = 0;
    for (int part = 0; part < parts->count; part++) {
        if (parts->peaks[part] < level) {
            continue;
        }
        for (int64_t id = part * parts->length, end = end_of(logits, parts, part); id < end; id++) {
            if (logits->values[id] >= level) {
                if (candidates == MOST_CANDIDATES) {
                    return 0;
                }
                found[candidates++] = (struct likely) {logits->values[id], (int32_t) id};
            }
        }
    }
    qsort(found, candidates, sizeof(struct likely), is_behind);
    for (int at = 0; at < count; at++) {
        ids[at] = found[at].id;
    }
    return 1;
}

// Write of each of ``rows`` the log probability of its token and those of its likeliest, one behind the other, and to
// ``ids`` the token and the likeliest. The token is -1 if the row is left. ``logits`` [any, size].
__attribute__((visibility("default"))) void caravan_logprob_rows(const float * logits, int64_t size,
                                                                 const struct caravan_logprob_row * rows, int64_t count,
                                                                 int32_t * ids, double * logprobs);

void caravan_logprob_rows(const float * logits, int64_t size, const struct caravan_logprob_row * rows, int64_t count,
                          int32_t * ids, double * logprobs) {
    for (int64_t at = 0; at < count; at++) {
        const struct caravan_logprob_row * row = &rows[at];
        const struct logits own = {logits + row->index * size, NULL, size};
        struct parts parts;
        struct weights weights;
        ids[0] = -1;
        if (find_parts(&own, (double) row->count, &parts) && find_likeliest(&own, &parts, row->count, ids + 1)) {
            weigh(&own, &(struct scaling) {parts.highest, 1.0f}, &parts, 0, &weights);
            const double normalizer = (double) parts.highest + log(weights.total);
            ids[0] = (int32_t) row->token;
            for (int64_t place = 0; place <= row->count; place++) {
                logprobs[place] = (double) own.values[ids[place]] - normalizer;
            }
        }
        ids += row->count + 1;
        logprobs += row->count + 1;
    }
}
