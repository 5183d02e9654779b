// Flash attention for CPUs in place of ggml's, which computes each query head by itself, and fewer than 64 rows one by
// one with sums in halves. Here, query heads that share a head of keys and values are computed together, with sums in
// floats.
//
// A tile is some rows of queries times those heads. What its rows see of the cells is weighed block by block, relative to
// the highest score so far (Dao et al. 2022, arXiv:2205.14135; Milakov and Gimelshein 2018, arXiv:1805.02867). Where
// tiles are few, threads share the cells of each.

#include "attention_mask.h"
#include "attention_plan.h"
#include "ggml-cpu.h"
#include "ops.h"

// The cells of a block. ``masked``: whether a row may not see all of them as they are.
struct cells {
    int64_t at[BLOCK_CELLS];
    int64_t count;
    int masked;
};

// Where a tile is: some rows of some heads, which share a head of keys, of a stream.
struct place {
    int64_t stream;
    int64_t key_head;
    int64_t head;
    int64_t heads;
    int64_t row;
    int64_t rows;
};

static const uint16_t * mask_of(const struct attention * call, const struct place * place, int64_t row) {
    const struct ggml_tensor * mask = call->mask;
    const int64_t stream = place->stream % mask->ne[3];
    return (const uint16_t *) ((const char *) mask->data + (place->row + row) * mask->nb[1] + stream * mask->nb[3]);
}

// Return what any row of a tile sees of ``count`` cells from ``cell`` on. It is masked too if some rows do not see it.
static struct span span_of_tile(const struct attention * call, const struct place * place, int64_t cell,
                                int64_t count) {
    if (!call->mask) {
        return (struct span) {~(uint64_t) 0 >> (SPAN - count), 0};
    }
    struct span span = {0};
    uint64_t common = ~(uint64_t) 0;
    for (int64_t row = 0; row < place->rows; row++) {
        const struct span own = span_of(mask_of(call, place, row) + cell, count);
        common &= own.visible;
        span.visible |= own.visible;
        span.masked |= own.masked;
    }
    span.masked |= common != span.visible;
    return span;
}

// Whether the rows of a tile see about the same cells. If not, they are computed one by one, which is less to do.
static int see_about_the_same(const struct attention * call, const struct place * place) {
    if (!call->mask || place->rows == 1) {
        return 1;
    }
    const int64_t cells = call->keys->ne[1];
    int64_t together = 0, apart = 0;
    for (int64_t cell = 0; cell < cells; cell += SPAN) {
        uint64_t visible = 0;
        for (int64_t row = 0; row < place->rows; row++) {
            const uint64_t own = span_of(mask_of(call, place, row) + cell, lesser(SPAN, cells - cell)).visible;
            visible |= own;
            apart += __builtin_popcountll(own);
        }
        together += __builtin_popcountll(visible);
    }
    return together * place->rows < 2 * apart;
}

static void load_queries(const struct attention * call, const struct place * place) {
    const struct ggml_tensor * queries = call->queries;
    float * query = call->tile.queries;
    for (int64_t row = place->row; row < place->row + place->rows; row++) {
        for (int64_t head = place->head; head < place->head + place->heads; head++) {
            const float * source = (const float *) ((const char *) queries->data + row * queries->nb[1] +
                                                    head * queries->nb[2] + place->stream * queries->nb[3]);
            for (int64_t at = 0; at < call->tile.key_size; at++) {
                *query++ = at < queries->ne[0] ? source[at] * call->scale : 0.0f;
            }
        }
    }
}

static void to_floats(const struct ggml_tensor * tensor, const void * source, float * vector) {
    if (tensor->type == GGML_TYPE_F32) {
        memcpy(vector, source, (size_t) tensor->ne[0] * sizeof(float));
    } else if (tensor->type == GGML_TYPE_F16) {
        ggml_cpu_fp16_to_fp32(source, vector, tensor->ne[0]);
    } else {
        ggml_get_type_traits(tensor->type)->to_float(source, vector, tensor->ne[0]);
    }
}

// Return the keys or values of a block's cells, as vectors of ``size`` numbers, and others up to ``end``.
static struct block load_block(struct attention * call, const struct ggml_tensor * tensor, const struct place * place,
                               const struct cells * cells, int64_t end, int64_t size) {
    const int64_t stream = place->stream / (call->queries->ne[3] / tensor->ne[3]);
    const char * start = (const char *) tensor->data + place->key_head * tensor->nb[2] + stream * tensor->nb[3];
    if (HAS_HALVES && tensor->type == GGML_TYPE_F16 && tensor->ne[0] == size) {
        for (int64_t at = 0; at < end; at++) {
            call->vectors[at] = (const uint16_t *) (start + cells->at[at < cells->count ? at : 0] * tensor->nb[1]);
        }
        return (struct block) {.size = size, .halves = call->vectors};
    }
    for (int64_t at = 0; at < cells->count; at++) {
        float * vector = call->block + at * size;
        to_floats(tensor, start + cells->at[at] * tensor->nb[1], vector);
        for (int64_t rest = tensor->ne[0]; rest < size; rest++) {
            vector[rest] = 0.0f;
        }
    }
    memset(call->block + cells->count * size, 0, (size_t) ((end - cells->count) * size) * sizeof(float));
    return (struct block) {.size = size, .floats = call->block};
}

// Cap the scores of a row, and fill them up to ``end``.
static void limit_scores(const struct attention * call, float * scores, int64_t count, int64_t end) {
    if (call->cap != 0.0f) {
        for (int64_t cell = 0; cell < count; cell++) {
            scores[cell] = call->cap * tanhf(scores[cell]);
        }
    }
    for (int64_t cell = count; cell < end; cell++) {
        scores[cell] = -INFINITY;
    }
}

// Return the factor of the mask for a ``head``.
static float slope_of(const struct attention * call, int64_t head) {
    if (call->max_bias == 0.0f) {
        return 1.0f;
    }
    int64_t even = 1;  // as many heads as the highest power of two has; those behind them lie between
    while (even * 2 <= call->queries->ne[2]) {
        even *= 2;
    }
    const float exponent = head < even ? head + 1 : head - even + 0.5f;
    return powf(2.0f, -call->max_bias * exponent / even);
}

static void mask_scores(const struct attention * call, const struct place * place, const struct cells * cells) {
    for (int64_t row = 0; row < place->rows; row++) {
        const uint16_t * halves = mask_of(call, place, row);
        float mask[BLOCK_CELLS] = {0};
        for (int64_t at = 0; at < cells->count; at++) {
            const uint16_t half = halves[cells->at[at]];
            mask[at] = half == 0 ? 0.0f : ggml_fp16_to_fp32(half);
        }
        for (int64_t head = 0; head < place->heads; head++) {
            const float slope = slope_of(call, place->head + head);
            float * scores = call->tile.scores + (row * place->heads + head) * BLOCK_CELLS;
            for (int64_t at = 0; at < cells->count; at++) {
                scores[at] += slope * mask[at];
            }
        }
    }
}

static void attend_to_block(struct attention * call, const struct place * place, const struct cells * cells) {
    const struct tile * tile = &call->tile;
    const int64_t end = pieces(cells->count, KEYS_STEP) * KEYS_STEP;
    const struct block keys = load_block(call, call->keys, place, cells, end, tile->key_size);
    score_block(tile, &keys, end);
    for (int64_t row = 0; row < tile->rows; row++) {
        limit_scores(call, tile->scores + row * BLOCK_CELLS, cells->count, end);
    }
    if (cells->masked) {
        mask_scores(call, place, cells);
    }
    for (int64_t row = 0; row < tile->rows; row++) {
        weigh_row(tile, row, end);
    }
    const struct block values = load_block(call, call->values, place, cells, cells->count, tile->value_size);
    add_block(tile, &values, cells->count);
}

static void clear_sums(const struct tile * tile, float * sums) {
    memset(sums, 0, (size_t) (tile->rows * sums_size(tile)) * sizeof(float));
    for (int64_t row = 0; row < tile->rows; row++) {
        sums[row * sums_size(tile) + HIGHEST] = -INFINITY;
    }
}

static void attend_to_part(struct attention * call, const struct place * place, int64_t part) {
    const int64_t end = lesser((part + 1) * PART_CELLS, call->keys->ne[1]);
    struct cells cells = {0};
    clear_sums(&call->tile, call->tile.sums);
    for (int64_t cell = part * PART_CELLS; cell < end; cell += SPAN) {
        const struct span span = span_of_tile(call, place, cell, lesser(SPAN, end - cell));
        for (uint64_t visible = span.visible; visible; visible &= visible - 1) {
            cells.at[cells.count++] = cell + __builtin_ctzll(visible);
            cells.masked |= span.masked;
            if (cells.count == BLOCK_CELLS) {
                attend_to_block(call, place, &cells);
                cells.count = cells.masked = 0;
            }
        }
    }
    if (cells.count) {
        attend_to_block(call, place, &cells);
    }
}

// Add the sums of a ``part`` of a row's cells to the sums of the parts before it.
static void add_part(const struct tile * tile, float * whole, const float * part) {
    if (part[HIGHEST] == -INFINITY) {
        return;
    }
    const float highest = part[HIGHEST] > whole[HIGHEST] ? part[HIGHEST] : whole[HIGHEST];
    const float before = expf(whole[HIGHEST] - highest), now = expf(part[HIGHEST] - highest);
    whole[HIGHEST] = highest;
    for (int64_t at = TOTAL; at < sums_size(tile); at++) {
        whole[at] = whole[at] * before + part[at] * now;
    }
}

static void write_row(const struct attention * call, int64_t stream, int64_t row, int64_t head, const float * whole) {
    float total = whole[TOTAL], factor = 1.0f;
    if (call->sinks) {
        const float sink = ((const float *) call->sinks->data)[head];
        const float highest = sink > whole[HIGHEST] ? sink : whole[HIGHEST];
        factor = expf(whole[HIGHEST] - highest);
        total = total * factor + expf(sink - highest);
    }
    factor = total == 0.0f ? 0.0f : factor / total;
    const struct ggml_tensor * results = call->results;
    float * result =
        (float *) ((char *) results->data + head * results->nb[1] + row * results->nb[2] + stream * results->nb[3]);
    for (int64_t at = 0; at < results->ne[0]; at++) {
        result[at] = whole[VALUES + at] * factor;
    }
}

static float * shared_sums(const struct attention * call, int64_t stream, int64_t row, int64_t head, int64_t part) {
    const struct ggml_tensor * q = call->queries;
    const int64_t at = ((stream * q->ne[1] + row) * q->ne[2] + head) * call->parts + part;
    return call->shared + at * sums_size(&call->tile);
}

// Compute the tile at ``place``, or only the part of it that is ``shared_part``.
static void attend(struct attention * call, const struct place * place, int64_t shared_part) {
    struct tile * tile = &call->tile;
    const int64_t size = sums_size(tile);
    tile->rows = place->rows * place->heads;
    load_queries(call, place);
    if (call->shared) {
        attend_to_part(call, place, shared_part);
    } else {
        clear_sums(tile, call->whole);
        for (int64_t part = 0; part < call->parts; part++) {
            attend_to_part(call, place, part);
            for (int64_t at = 0; at < tile->rows; at++) {
                add_part(tile, call->whole + at * size, tile->sums + at * size);
            }
        }
    }
    for (int64_t at = 0; at < tile->rows; at++) {
        const int64_t row = place->row + at / place->heads, head = place->head + at % place->heads;
        if (call->shared) {
            float * to = shared_sums(call, place->stream, row, head, shared_part);
            memcpy(to, tile->sums + at * size, (size_t) size * sizeof(float));
        } else {
            write_row(call, place->stream, row, head, call->whole + at * size);
        }
    }
}

static void attend_unit(struct attention * call, int64_t unit) {
    int64_t part = 0;
    if (call->shared) {
        part = unit % call->parts;
        unit /= call->parts;
    }
    struct place place;
    place.row = unit % call->tiles_of_rows * call->rows;
    place.rows = lesser(call->rows, call->queries->ne[1] - place.row);
    unit /= call->tiles_of_rows;
    const int64_t head = unit % call->tiles_of_group * call->heads;
    place.heads = lesser(call->heads, call->group - head);
    unit /= call->tiles_of_group;
    place.key_head = unit % call->keys->ne[2];
    place.head = place.key_head * call->group + head;
    place.stream = unit / call->keys->ne[2];
    if (see_about_the_same(call, &place)) {
        attend(call, &place, part);
        return;
    }
    const int64_t end = place.row + place.rows;
    for (place.rows = 1; place.row < end; place.row++) {
        attend(call, &place, part);
    }
}

// Put together the parts that threads computed.
static void join_parts(struct attention * call, int thread, int threads) {
    const struct ggml_tensor * q = call->queries;
    struct tile * tile = &call->tile;
    tile->rows = 1;
    for (int64_t at = thread; at < q->ne[3] * q->ne[1] * q->ne[2]; at += threads) {
        const int64_t stream = at / q->ne[2] / q->ne[1], row = at / q->ne[2] % q->ne[1], head = at % q->ne[2];
        clear_sums(tile, call->whole);
        for (int64_t part = 0; part < call->parts; part++) {
            add_part(tile, call->whole, shared_sums(call, stream, row, head, part));
        }
        write_row(call, stream, row, head, call->whole);
    }
}

// Compute a GGML_OP_FLASH_ATTN_EXT. Return 0 if it is of a kind that llama.cpp does not use; nothing is done then.
static int attend_to_all(const struct ggml_compute_params * params, struct ggml_tensor * results) {
    struct attention call = {
        .queries = results->src[0],
        .keys = results->src[1],
        .values = results->src[2],
        .mask = results->src[3],
        .sinks = results->src[4],
        .results = results,
        .scale = ggml_get_op_params_f32(results, 0),
        .max_bias = ggml_get_op_params_f32(results, 1),
        .cap = ggml_get_op_params_f32(results, 2),
    };
    if (!is_supported(&call) || !plan(&call, params)) {
        return 0;
    }
    if (call.cap != 0.0f) {
        call.scale /= call.cap;
    }
    if (params->ith == 0) {
        ggml_threadpool_chunk_set(params->threadpool, params->nth);
    }
    ggml_barrier(params->threadpool);
    const int64_t units = call.shared ? call.tiles * call.parts : call.tiles;
    for (int64_t unit = params->ith; unit < units; unit = ggml_threadpool_chunk_add(params->threadpool, 1)) {
        attend_unit(&call, unit);
    }
    if (call.shared) {
        ggml_barrier(params->threadpool);
        join_parts(&call, params->ith, params->nth);
    }
    return 1;
}

void caravan_flash_attn_ext(const struct ggml_compute_params * params, struct ggml_tensor * results) {
    if (params->use_ref || !attend_to_all(params, results)) {
        struct ggml_compute_params reference = *params;
        // It has neither tiles nor parts of cells.
        reference.use_ref = params->use_ref || caravan_row_by_row;
        ggml_compute_forward_flash_attn_ext(&reference, results);
    }
}
