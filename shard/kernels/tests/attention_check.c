// Computes attention of all kinds by some threads: `attention_check SEED ROUNDS`. Exits with 1 if a result differs from
// that in double precision.

#include <pthread.h>
#include <string.h>

#include "barrier.h"
#include "flash_attention.c"
#include "random.h"

#define MOST_THREADS 5
#define HIDDEN_HALF 0xfc00
#define ONE_HALF 0x3c00
// Of numbers whose weighted mean is about 1.
#define TOLERANCE 2e-4

struct ggml_threadpool {
    atomic_int arrived, passed, chunk;
    int threads;
};

static atomic_int given_up;

void ggml_threadpool_chunk_set(struct ggml_threadpool * pool, int value) {
    atomic_store_explicit(&pool->chunk, value, memory_order_relaxed);
}

int ggml_threadpool_chunk_add(struct ggml_threadpool * pool, int value) {
    return atomic_fetch_add_explicit(&pool->chunk, value, memory_order_relaxed);
}

void ggml_barrier(struct ggml_threadpool * pool) {
    if (pool->threads > 1) {
        caravan_wait_for_all(&pool->arrived, &pool->passed, pool->threads);
    }
}

void ggml_compute_forward_flash_attn_ext(const struct ggml_compute_params * params, struct ggml_tensor * results) {
    (void) params, (void) results;
    atomic_fetch_add(&given_up, 1);
}

float ggml_get_op_params_f32(const struct ggml_tensor * tensor, uint32_t at) { return tensor->op_params[at]; }

float ggml_fp16_to_fp32(uint16_t half) {
    const int exponent = half >> 10 & 31, fraction = half & 1023;
    const float size = exponent == 31  ? (fraction ? NAN : INFINITY)
                       : exponent == 0 ? ldexpf((float) fraction, -24)
                                       : ldexpf((float) (1024 + fraction), exponent - 25);
    return half >> 15 ? -size : size;
}

void ggml_cpu_fp16_to_fp32(const uint16_t * from, float * to, int64_t count) {
    for (int64_t at = 0; at < count; at++) {
        to[at] = ggml_fp16_to_fp32(from[at]);
    }
}

// Here a number of q8_0 is a byte of eighths.
static void eighths_to_floats(const void * from, float * to, int64_t count) {
    for (int64_t at = 0; at < count; at++) {
        to[at] = (float) ((const int8_t *) from)[at] / 8.0f;
    }
}

const struct ggml_type_traits * ggml_get_type_traits(enum ggml_type type) {
    static const struct ggml_type_traits of_eighths = {eighths_to_floats};
    return type == GGML_TYPE_Q8_0 ? &of_eighths : NULL;
}

bool llamafile_sgemm(const struct ggml_compute_params * params, int64_t m, int64_t n, int64_t k, const void * a,
                     int64_t lda, const void * b, int64_t ldb, void * c, int64_t ldc, int a_type, int b_type,
                     int c_type) {
    (void) params, (void) m, (void) n, (void) k, (void) a, (void) lda, (void) b, (void) ldb, (void) c, (void) ldc;
    (void) a_type, (void) b_type, (void) c_type;
    return true;
}

bool ggml_compute_forward_mul_mat_tiled(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    (void) params, (void) dst;
    return true;
}

bool ggml_compute_forward_mul_mat_id_tiled(const struct ggml_compute_params * params, struct ggml_tensor * dst,
                                           int64_t expert, int64_t row_count, const int32_t * rows, char * scratch) {
    (void) params, (void) dst, (void) expert, (void) row_count, (void) rows, (void) scratch;
    return true;
}

static size_t width_of(enum ggml_type type) {
    return type == GGML_TYPE_F32 ? sizeof(float) : type == GGML_TYPE_F16 ? sizeof(uint16_t) : 1;
}

static struct ggml_tensor tensor(enum ggml_type type, int64_t a, int64_t b, int64_t c, int64_t d) {
    const size_t width = width_of(type);
    struct ggml_tensor made = {.type = type, .ne = {a, b, c, d}};
    made.nb[0] = width;
    for (int at = 1; at < GGML_MAX_DIMS; at++) {
        made.nb[at] = made.nb[at - 1] * (size_t) made.ne[at - 1];
    }
    made.data = room((size_t) (a * b * c * d) * width);
    return made;
}

// Return keys or values, [size, cells, heads, streams], of which each cell has all heads together, as llama.cpp's cache.
static struct ggml_tensor cells_of(enum ggml_type type, int64_t size, int64_t cells, int64_t heads, int64_t streams) {
    struct ggml_tensor made = tensor(type, size, heads, cells, streams);
    for (int64_t at = 0; at < size * heads * cells * streams; at++) {
        if (type == GGML_TYPE_F32) {
            ((float *) made.data)[at] = normal();
        } else if (type == GGML_TYPE_F16) {
            // 1 to 2, of either sign
            ((uint16_t *) made.data)[at] = (uint16_t) (below(2) << 15 | 0x3c00 | below(1024));
        } else {
            ((int8_t *) made.data)[at] = (int8_t) (below(33) - 16);
        }
    }
    const int64_t swapped = made.ne[1];
    const size_t stride = made.nb[1];
    made.ne[1] = made.ne[2], made.nb[1] = made.nb[2];
    made.ne[2] = swapped, made.nb[2] = stride;
    return made;
}

enum { NO_MASK, CAUSAL, WINDOW, SCATTERED, BIASED, EMPTY_ROWS, MASKS };

static void fill_mask(struct ggml_tensor * mask, int kind) {
    const int64_t cells = mask->ne[0], rows = mask->ne[1], window = 1 + below(cells);
    uint16_t * half = mask->data;
    for (int64_t at = 0; at < cells * rows * mask->ne[3]; at++) {
        const int64_t cell = at % cells, row = at / cells % rows, end = cells - rows + row;
        const int is_hidden = kind == SCATTERED    ? below(rows + 1) != 0
                              : kind == EMPTY_ROWS ? row % 2 == 0 || cell > end
                                                   : cell > end || (kind == WINDOW && cell <= end - window);
        half[at] = is_hidden ? HIDDEN_HALF : kind == BIASED ? (uint16_t) (0x8000 | ONE_HALF | below(64)) : 0;
    }
}

static double number_at(const struct ggml_tensor * tensor, int64_t a, int64_t b, int64_t c, int64_t d) {
    const char * at = (const char *) tensor->data + (size_t) a * tensor->nb[0] + (size_t) b * tensor->nb[1] +
                      (size_t) c * tensor->nb[2] + (size_t) d * tensor->nb[3];
    return tensor->type == GGML_TYPE_F32   ? (double) *(const float *) at
           : tensor->type == GGML_TYPE_F16 ? (double) ggml_fp16_to_fp32(*(const uint16_t *) at)
                                           : *(const int8_t *) at / 8.0;
}

// Return the factor of the mask for a head, as ALiBi has it.
static double bias_slope(const struct ggml_tensor * results, int64_t head) {
    const int64_t heads = results->src[0]->ne[2];
    const double most = (double) results->op_params[1], even = exp2(floor(log2((double) heads)));
    const double step = (double) head < even ? (double) head + 1.0 : (double) head - even + 0.5;
    return most == 0.0 ? 1.0 : exp2(-most / even * step);
}

// Compare the row of a head with attention in double precision.
static void check_row(const struct ggml_tensor * results, int64_t row, int64_t head, int64_t stream) {
    const struct ggml_tensor *q = results->src[0], *k = results->src[1], *v = results->src[2], *mask = results->src[3];
    const int64_t group = q->ne[2] / k->ne[2], cells = k->ne[1], size = v->ne[0];
    const double cap = (double) results->op_params[2], slope = bias_slope(results, head);
    double highest = -INFINITY, total = 0.0;
    double *weights = room((size_t) cells * sizeof *weights), *sums = room((size_t) size * sizeof *sums);
    for (int64_t cell = 0; cell < cells; cell++) {
        double score = 0.0;
        for (int64_t at = 0; at < q->ne[0]; at++) {
            score += number_at(q, at, row, head, stream) * number_at(k, at, cell, head / group, stream);
        }
        score *= (double) results->op_params[0];
        score = cap != 0.0 ? cap * tanh(score / cap) : score;
        weights[cell] = score + (mask ? slope * number_at(mask, cell, row, 0, stream % mask->ne[3]) : 0.0);
        highest = weights[cell] > highest ? weights[cell] : highest;
    }
    const double sink = results->src[4] ? number_at(results->src[4], head, 0, 0, 0) : -INFINITY;
    highest = sink > highest ? sink : highest;
    total = isinf(highest) ? 1.0 : exp(sink - highest);
    for (int64_t cell = 0; cell < cells; cell++) {
        weights[cell] = isinf(highest) ? 0.0 : exp(weights[cell] - highest);
        total += weights[cell];
        for (int64_t at = 0; at < size && weights[cell] > 0.0; at++) {
            sums[at] += weights[cell] * number_at(v, at, cell, head / group, stream);
        }
    }
    for (int64_t at = 0; at < size; at++) {
        const double found = number_at(results, at, head, row, stream), expected = sums[at] / total;
        CHECK(fabs(found - expected) < TOLERANCE, "%g instead of %g", found, expected);
    }
    free(weights);
    free(sums);
}

static void * compute(void * given) {
    struct {
        struct ggml_compute_params params;
        struct ggml_tensor * results;
    } * own = given;
    caravan_flash_attn_ext(&own->params, own->results);
    return NULL;
}

static void compute_by_all(struct ggml_tensor * results, size_t bytes, int threads) {
    struct ggml_threadpool pool = {.threads = threads};
    void * memory = room(bytes);
    struct {
        struct ggml_compute_params params;
        struct ggml_tensor * results;
    } own[MOST_THREADS];
    pthread_t running[MOST_THREADS];
    for (int thread = 0; thread < threads; thread++) {
        own[thread].params = (struct ggml_compute_params) {thread, threads, bytes, memory, &pool, false};
        own[thread].results = results;
        if (pthread_create(&running[thread], NULL, compute, &own[thread]) != 0) {
            abort();
        }
    }
    for (int thread = 0; thread < threads; thread++) {
        pthread_join(running[thread], NULL);
    }
    free(memory);
}

// Return the bytes that the threads need, and with ``are_shared`` those to share the parts of tiles.
static size_t bytes_of(struct ggml_tensor * results, int threads, int are_shared) {
    struct attention call = {.queries = results->src[0], .keys = results->src[1], .values = results->src[2]};
    struct ggml_compute_params params = {.nth = threads};
    static float memory[1];
    params.wdata = memory;
    plan(&call, &params);
    const struct ggml_tensor * q = call.queries;
    const int64_t shared = q->ne[3] * q->ne[2] * q->ne[1] * call.parts * sums_size(&call.tile);
    return (size_t) (divide_memory(&call, memory, 0) * threads + (are_shared ? shared : 0)) * sizeof(float);
}

// Return whether our own attention computed it.
static int check_call(void) {
    static const int64_t sizes[] = {32, 40, 64, 72, 80, 96, 128, 256}, groups[] = {1, 1, 2, 3, 4, 5, 8, 30};
    static const int64_t many_cells[] = {1, 2, 15, 16, 17, 63, 64, 65, 255, 256, 257, 300, 530, 700, 1100};
    static const int64_t many_rows[] = {1, 1, 1, 2, 3, 7, 9, 24, 25, 40};
    static const enum ggml_type types[] = {GGML_TYPE_F16, GGML_TYPE_F16, GGML_TYPE_F32, GGML_TYPE_Q8_0};
    const int64_t size = ANY_OF(sizes), value_size = below(3) ? size : ANY_OF(sizes), heads = 1 + below(3);
    const int64_t group = ANY_OF(groups), streams = 1 + below(2), drawn_rows = ANY_OF(many_rows);
    const int64_t cells = ANY_OF(many_cells), rows = drawn_rows < cells ? drawn_rows : cells;
    const enum ggml_type type = ANY_OF(types);
    struct ggml_tensor queries = tensor(GGML_TYPE_F32, size, rows, heads * group, streams);
    for (int64_t at = 0; at < size * rows * heads * group * streams; at++) {
        ((float *) queries.data)[at] = normal();
    }
    struct ggml_tensor keys = cells_of(type, size, cells, heads, streams);
    struct ggml_tensor values = cells_of(type, value_size, cells, heads, streams);
    struct ggml_tensor mask = tensor(GGML_TYPE_F16, cells, rows, 1, below(2) ? streams : 1);
    struct ggml_tensor sinks = tensor(GGML_TYPE_F32, heads * group, 1, 1, 1);
    const int kind = (int) below(MASKS), has_sinks = below(4) == 0, has_nan = below(10) == 0;
    fill_mask(&mask, kind);
    if (has_nan) {
        ((float *) queries.data)[below(size * rows)] = below(2) ? NAN : INFINITY;
    }
    struct ggml_tensor results = tensor(GGML_TYPE_F32, value_size, heads * group, rows, streams);
    results.src[0] = &queries, results.src[1] = &keys, results.src[2] = &values;
    results.src[3] = kind == NO_MASK ? NULL : &mask, results.src[4] = has_sinks ? &sinks : NULL;
    results.op_params[0] = 1.0f / sqrtf((float) size);
    results.op_params[1] = below(4) ? 0.0f : 8.0f;
    results.op_params[2] = below(4) ? 0.0f : 20.0f;

    const int threads = 1 + (int) below(MOST_THREADS);
    caravan_row_by_row = below(5) == 0;
    const size_t needed = bytes_of(&results, threads, 0), enough = bytes_of(&results, threads, 1);
    const size_t choices[] = {enough, enough, needed, enough - 1, needed - 1};
    const size_t bytes = ANY_OF(choices);
    atomic_store(&given_up, 0);
    compute_by_all(&results, bytes, threads);
    const int are_computed = atomic_load(&given_up) == 0;
    CHECK(are_computed == (bytes >= needed), "%zu bytes, and %zu are needed", bytes, needed);
    for (int check = 0; check < 3 && are_computed && !has_nan; check++) {
        check_row(&results, below(rows), below(heads * group), below(streams));
    }
    void * const all[] = {queries.data, keys.data, values.data, mask.data, sinks.data, results.data};
    for (size_t at = 0; at < sizeof all / sizeof *all; at++) {
        free(all[at]);
    }
    return are_computed;
}

int main(int count, char ** given) {
    if (count != 3) {
        return 2;
    }
    random_state = strtoull(given[1], NULL, 10);
    const int64_t rounds = atoll(given[2]);
    int64_t computed = 0;
    for (int64_t round = 0; round < rounds; round++) {
        computed += check_call();
    }
    printf("%ld calls computed\n", (long) computed);
    return computed == 0;
}
