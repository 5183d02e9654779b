// Takes states of all sizes into rooms of all sizes: `states_check SEED ROUNDS`. Exits with 1 if they are not those of
// the node, or if it takes what does not fit.

#include <string.h>

#include "ggml_stand_in.h"
#include "random.h"

// Must be what take_states.c has.
struct caravan_states {
    void * rows;
    int64_t room;
    int64_t taken;
};

bool caravan_take_states(struct ggml_tensor * node, bool ask, void * data);

size_t ggml_nbytes(const struct ggml_tensor * tensor) {
    return (size_t) (tensor->ne[0] * tensor->ne[1]) * tensor->nb[0];
}

bool ggml_is_contiguous(const struct ggml_tensor * tensor) {
    return tensor->nb[1] == tensor->nb[0] * (size_t) tensor->ne[0];
}

void ggml_backend_tensor_get(const struct ggml_tensor * tensor, void * data, size_t offset, size_t size) {
    memcpy(data, (const char *) tensor->data + offset, size);
}

static int check_node(void) {
    const int64_t size = 1 + below(100), rows = below(9), most = below(9);
    const int is_half = below(5) == 0, has_gaps = below(5) == 0;
    const size_t width = is_half ? sizeof(uint16_t) : sizeof(float);
    struct ggml_tensor node = {
        .type = is_half ? GGML_TYPE_F16 : GGML_TYPE_F32,
        .ne = {size, rows, 1, 1},
        .nb = {width, width * (size_t) size + (has_gaps ? 4 : 0)},
        .data = room((size_t) rows * (width * (size_t) size + 4)),
    };
    strcpy(node.name, "result_norm");
    memset(node.data, 1, (size_t) rows * width * (size_t) size);
    const size_t bytes = (size_t) (most * size) * sizeof(float);
    struct caravan_states states = {room(bytes), (int64_t) bytes, 0};
    CHECK(caravan_take_states(&node, true, &states), "the node is not wanted");
    CHECK(!caravan_take_states(&node, false, &states), "the graph goes on");
    const int fits = !is_half && !has_gaps && rows <= most;
    CHECK(states.taken == (fits ? (int64_t) ggml_nbytes(&node) : -1), "took %ld bytes", (long) states.taken);
    CHECK(!fits || memcmp(states.rows, node.data, ggml_nbytes(&node)) == 0, "the states differ");
    strcpy(node.name, "result_output");
    CHECK(!caravan_take_states(&node, true, &states), "another node is wanted");
    free(node.data);
    free(states.rows);
    return fits;
}

int main(int count, char ** given) {
    if (count != 3) {
        return 2;
    }
    random_state = strtoull(given[1], NULL, 10);
    const int64_t rounds = atoll(given[2]);
    int64_t taken = 0;
    for (int64_t round = 0; round < rounds; round++) {
        taken += check_node();
    }
    printf("%ld states taken\n", (long) taken);
    return taken == 0;
}
