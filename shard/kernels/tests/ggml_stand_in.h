// What the kernels need of ggml's headers, so that it can be compiled without llama.cpp. Layouts may differ from ggml's.

#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GGML_MAX_DIMS 4
#define GGML_USE_LLAMAFILE

enum ggml_type { GGML_TYPE_F32 = 0, GGML_TYPE_F16 = 1, GGML_TYPE_Q8_0 = 8 };

struct ggml_tensor {
    enum ggml_type type;
    int64_t ne[GGML_MAX_DIMS];
    size_t nb[GGML_MAX_DIMS];
    float op_params[4];
    struct ggml_tensor * src[5];
    void * data;
    char name[64];
};

struct ggml_threadpool;

struct ggml_compute_params {
    int ith, nth;
    size_t wsize;
    void * wdata;
    struct ggml_threadpool * threadpool;
    bool use_ref;
};

struct ggml_type_traits {
    void (*to_float)(const void * from, float * to, int64_t count);
};

float ggml_get_op_params_f32(const struct ggml_tensor * tensor, uint32_t at);
float ggml_fp16_to_fp32(uint16_t half);
void ggml_cpu_fp16_to_fp32(const uint16_t * from, float * to, int64_t count);
const struct ggml_type_traits * ggml_get_type_traits(enum ggml_type type);
void ggml_threadpool_chunk_set(struct ggml_threadpool * threadpool, int value);
int ggml_threadpool_chunk_add(struct ggml_threadpool * threadpool, int value);
void ggml_barrier(struct ggml_threadpool * threadpool);
void ggml_compute_forward_flash_attn_ext(const struct ggml_compute_params * params, struct ggml_tensor * dst);

size_t ggml_nbytes(const struct ggml_tensor * tensor);
bool ggml_is_contiguous(const struct ggml_tensor * tensor);
void ggml_backend_tensor_get(const struct ggml_tensor * tensor, void * data, size_t offset, size_t size);

bool llamafile_sgemm(const struct ggml_compute_params * params, int64_t m, int64_t n, int64_t k, const void * a,
                     int64_t lda, const void * b, int64_t ldb, void * c, int64_t ldc, int a_type, int b_type,
                     int c_type);
bool ggml_compute_forward_mul_mat_tiled(const struct ggml_compute_params * params, struct ggml_tensor * dst);
bool ggml_compute_forward_mul_mat_id_tiled(const struct ggml_compute_params * params, struct ggml_tensor * dst,
                                           int64_t expert, int64_t row_count, const int32_t * rows, char * scratch);
