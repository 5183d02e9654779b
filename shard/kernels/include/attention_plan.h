// What is computed of attention together: tiles and parts of cells, and the memory that they take.

#pragma once

#include "attention_tile.h"
#include "ggml-cpu-impl.h"
#include "row_by_row.h"

// The cells of a row are computed in parts, which are then added in order. Where one begins depends on nothing else, so
// that the result is the same whether one thread computes all parts or several do.
#define PART_CELLS 256
// With fewer tiles for each thread, threads share the parts of a tile.
#define TILES_PER_THREAD 4

struct attention {
    const struct ggml_tensor * queries;
    const struct ggml_tensor * keys;
    const struct ggml_tensor * values;
    const struct ggml_tensor * mask;   // null: all cells are visible
    const struct ggml_tensor * sinks;  // null: none
    struct ggml_tensor * results;
    float scale;
    float cap;       // of the scores; 0: none
    float max_bias;  // of ALiBi (Press et al. 2021, arXiv:2108.12409); 0: the mask is the same for all heads
    int64_t group;   // heads of queries for each head of keys
    int64_t heads;   // of a tile
    int64_t rows;    // of a tile, for each head
    int64_t tiles_of_group;
    int64_t tiles_of_rows;
    int64_t tiles;
    int64_t parts;
    float * shared;  // [stream, row, head][part][sums_size]; null: one thread computes all parts of a tile
    // Of a thread:
    struct tile tile;
    float * block;  // [BLOCK_CELLS][key_size or value_size]
    const uint16_t * vectors[BLOCK_CELLS];
    float * whole;  // [rows * heads][sums_size]: the parts so far
};

static int64_t lesser(int64_t one, int64_t other) { return one < other ? one : other; }

static int64_t pieces(int64_t whole, int64_t piece) { return (whole + piece - 1) / piece; }

static int64_t whole_vectors(int64_t size) { return pieces(size, LANES) * LANES; }

static int is_supported(const struct attention * call) {
    const struct ggml_tensor *q = call->queries, *k = call->keys, *v = call->values, *mask = call->mask;
    return q->type == GGML_TYPE_F32 && q->nb[0] == sizeof(float) && k->ne[2] == v->ne[2] && k->ne[3] == v->ne[3] &&
           (!mask || (mask->type == GGML_TYPE_F16 && mask->ne[2] == 1));
}

static float * take(float ** memory, int64_t count) {
    float * taken = *memory;
    *memory += pieces(count, 16) * 16;
    return taken;
}

// Give the thread its part of the work buffer. Return how many floats each thread has.
static int64_t divide_memory(struct attention * call, float * memory, int thread) {
    struct tile * tile = &call->tile;
    const int64_t rows = call->rows * call->heads;
    const int64_t vector = tile->key_size > tile->value_size ? tile->key_size : tile->value_size;
    float * end = memory;
    float ** arrays[] = {&tile->queries, &tile->scores, &tile->sums, &call->block, &call->whole};
    const int64_t counts[] = {
        rows * tile->key_size, rows * BLOCK_CELLS, rows * sums_size(tile), BLOCK_CELLS * vector, rows * sums_size(tile),
    };
    for (int at = 0; at < 5; at++) {
        *arrays[at] = take(&end, counts[at]);
    }
    for (int at = 0; at < 5; at++) {
        *arrays[at] += (end - memory) * thread;
    }
    return end - memory;
}

// Decide about tiles, and which of them are shared. Return 0 if there is too little memory.
static int plan(struct attention * call, const struct ggml_compute_params * params) {
    const struct ggml_tensor *q = call->queries, *k = call->keys;
    call->group = q->ne[2] / k->ne[2];
    call->heads = lesser(call->group, TILE_ROWS);
    call->rows = caravan_row_by_row ? 1 : lesser(q->ne[1], TILE_ROWS / call->heads);
    call->tiles_of_group = pieces(call->group, call->heads);
    call->tiles_of_rows = pieces(q->ne[1], call->rows);
    call->tiles = q->ne[3] * k->ne[2] * call->tiles_of_group * call->tiles_of_rows;
    call->parts = pieces(k->ne[1], PART_CELLS);
    call->tile.key_size = whole_vectors(k->ne[0]);
    call->tile.value_size = whole_vectors(call->values->ne[0]);

    float * memory = params->wdata;
    const int64_t taken = divide_memory(call, memory, params->ith) * params->nth;
    const int64_t left = (int64_t) (params->wsize / sizeof(float)) - taken;
    const int64_t needed = q->ne[3] * q->ne[2] * q->ne[1] * call->parts * sums_size(&call->tile);
    if (params->nth > 1 && call->parts > 1 && call->tiles < TILES_PER_THREAD * params->nth && needed <= left) {
        call->shared = memory + taken;
    }
    return left >= 0;
}
