// Draws rows of all kinds with all kinds of filters: `draw_check SEED ROUNDS`. Exits with 1 if a token is none that may be
// drawn, or another one where threads share the rows.

#include "logits_drawn.h"
#include "row.h"

void caravan_choose_tokens(const float * logits, int64_t size, const struct caravan_row * rows, int64_t count,
                           int32_t * tokens, int64_t threads);

#define MOST_ROWS 8
// What caravan_shard/sampling/token_candidates.py has.
#define HOPELESS 36.0

static int is_allowed(const uint8_t * mask, int64_t id) { return !mask || mask[id / 8] >> (id % 8) & 1; }

static uint8_t * drawn_mask(int64_t size) {
    if (below(2)) {
        return NULL;
    }
    static const int densities[] = {1, 1, 2, 50};
    const int density = ANY_OF(densities);
    uint8_t * mask = room((size_t) (size + 7) / 8);
    for (int64_t id = 0; id < size; id++) {
        mask[id / 8] |= (uint8_t) ((below(density) == 0) << (id % 8));
    }
    return mask;
}

static struct caravan_row drawn_row(int64_t index, int64_t size) {
    static const double temperatures[] = {0.0, 0.02, 0.7, 0.8, 1.0, 1.7, 1e-300, 1e-45, 1e-38, 1e30};
    static const double top_ks[] = {0.0, 0.0, 1.0, 5.0, 40.0, 200.0, 5000.0, 8192.0, 9000.0, 1e9};
    static const double typical_ps[] = {1.0, 1.0, 0.9, 0.3}, top_ps[] = {1.0, 1.0, 0.95, 0.5, 0.9999, 1e-9};
    static const double min_ps[] = {0.0, 0.0, 0.05, 1e-4, 1.0}, xtc_thresholds[] = {INFINITY, INFINITY, 0.1, 0.4};
    static const double numbers[] = {0.0, 0.5, 1.0 - 0x1p-53, -1.0};
    struct caravan_row row = {
        .index = index,
        .mask = drawn_mask(size),
        .number = ANY_OF(numbers),
        .xtc_threshold = ANY_OF(xtc_thresholds),
        .temperature = ANY_OF(temperatures),
        .top_k = ANY_OF(top_ks),
        .top_p = ANY_OF(top_ps),
        .min_p = ANY_OF(min_ps),
        .reach = HOPELESS,
    };
    row.number = row.number < 0.0 ? unit() : row.number;
    row.typical_p = row.top_k > 0.0 ? ANY_OF(typical_ps) : 1.0;
    if (row.top_k == 0.0 && row.min_p > 0.0 && -log(row.min_p) < HOPELESS) {
        row.reach = -log(row.min_p) + 1e-3;
    }
    return row;
}

// Return how many rows were drawn.
static int64_t check_step(int64_t size, int64_t count) {
    float * logits = room((size_t) (count * size) * sizeof *logits);
    struct caravan_row * rows = room((size_t) count * sizeof *rows);
    int32_t *tokens = room((size_t) count * sizeof *tokens), *shared = room((size_t) count * sizeof *shared);
    for (int64_t at = 0; at < count; at++) {
        fill_row(logits + at * size, size);
        rows[at] = drawn_row(count - 1 - at, size);
    }
    caravan_choose_tokens(logits, size, rows, count, tokens, 1);
    caravan_choose_tokens(logits, size, rows, count, shared, 2 + below(4));
    int64_t drawn = 0;
    for (int64_t at = 0; at < count; at++) {
        const int32_t token = tokens[at];
        CHECK(shared[at] == token, "%d, and %d where threads share the rows", token, shared[at]);
        CHECK(token >= -1 && token < size, "token %d of %ld", token, (long) size);
        CHECK(token < 0 || is_allowed(rows[at].mask, token), "token %d, which is masked", token);
        CHECK(token < 0 || isfinite(logits[rows[at].index * size + token]), "token %d, which is impossible", token);
        drawn += token >= 0;
        free((void *) rows[at].mask);
    }
    free(logits);
    free(rows);
    free(tokens);
    free(shared);
    return drawn;
}

int main(int count, char ** given) {
    if (count != 3) {
        return 2;
    }
    random_state = strtoull(given[1], NULL, 10);
    const int64_t rounds = atoll(given[2]);
    int64_t drawn = 0;
    for (int64_t round = 0; round < rounds; round++) {
        drawn += check_step(ANY_OF(SIZES), 1 + below(MOST_ROWS));
        if (round % 100 == 0) {
            // So many that threads share the rows.
            drawn += check_step((1 << 17) + below(50), 4 + below(MOST_ROWS - 4));
        }
    }
    printf("%ld rows drawn\n", (long) drawn);
    return drawn == 0;
}
