// Computes log probabilities of rows of all kinds: `logprob_check SEED ROUNDS`. Exits with 1 if those of a row are no log
// probabilities in falling order of its tokens.

#include "logits_drawn.h"

// Must be what logprob_rows.c has.
struct caravan_logprob_row {
    int64_t index;
    int64_t token;
    int64_t count;
};

void caravan_logprob_rows(const float * logits, int64_t size, const struct caravan_logprob_row * rows, int64_t count,
                          int32_t * ids, double * logprobs);

#define MOST_ROWS 6

static void check_row(const struct caravan_logprob_row * row, const float * logits, int64_t size, const int32_t * ids,
                      const double * logprobs) {
    CHECK(ids[0] == row->token, "token %d, not %ld", ids[0], (long) row->token);
    for (int64_t place = 0; place <= row->count; place++) {
        CHECK(ids[place] >= 0 && ids[place] < size, "token %d of %ld", ids[place], (long) size);
        CHECK(logprobs[place] < 1e-5, "log probability %g", logprobs[place]);
        CHECK(place < 2 || logits[ids[place - 1]] >= logits[ids[place]], "place %ld is too high", (long) place);
    }
}

// Return how many rows were computed.
static int64_t check_step(int64_t size, int64_t count) {
    static const int64_t wanted[] = {0, 1, 5, 20, 8192, 10000, 1 << 30};
    float * logits = room((size_t) (count * size) * sizeof *logits);
    struct caravan_logprob_row * rows = room((size_t) count * sizeof *rows);
    int64_t values = 0;
    for (int64_t at = 0; at < count; at++) {
        fill_row(logits + at * size, size);
        const int64_t likeliest = ANY_OF(wanted);
        rows[at] = (struct caravan_logprob_row) {count - 1 - at, below(size), likeliest < size ? likeliest : size};
        values += rows[at].count + 1;
    }
    int32_t * ids = room((size_t) values * sizeof *ids);
    double * logprobs = room((size_t) values * sizeof *logprobs);
    caravan_logprob_rows(logits, size, rows, count, ids, logprobs);
    int64_t computed = 0, start = 0;
    for (int64_t at = 0; at < count; at++) {
        if (ids[start] >= 0) {
            check_row(&rows[at], logits + rows[at].index * size, size, ids + start, logprobs + start);
            computed++;
        }
        start += rows[at].count + 1;
    }
    free(logits);
    free(rows);
    free(ids);
    free(logprobs);
    return computed;
}

int main(int count, char ** given) {
    if (count != 3) {
        return 2;
    }
    random_state = strtoull(given[1], NULL, 10);
    const int64_t rounds = atoll(given[2]);
    int64_t computed = 0;
    for (int64_t round = 0; round < rounds; round++) {
        computed += check_step(ANY_OF(SIZES), 1 + below(MOST_ROWS));
        if (round % 100 == 0) {
            computed += check_step(600001, 1);
        }
    }
    printf("%ld rows computed\n", (long) computed);
    return computed == 0;
}
