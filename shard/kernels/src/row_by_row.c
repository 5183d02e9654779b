// Lets a program switch off those kernels of ggml's CPU backend that compute several rows of a matrix product together.
//
// They add in another order than the kernels for a single row, so that the result for a row depends on how many rows
// there are. Without them, each row is a sum of dot products with the weights. llama.cmake compiles ggml-cpu.c so that it
// calls these functions.

#include "row_by_row.h"

#include "ggml-cpu-impl.h"
#include "llamafile/sgemm.h"
#include "tiled/tiled.h"

__attribute__((visibility("default"))) int caravan_row_by_row = 0;

bool caravan_sgemm(const struct ggml_compute_params * params, int64_t m, int64_t n, int64_t k, const void * a,
                   int64_t lda, const void * b, int64_t ldb, void * c, int64_t ldc, int a_type, int b_type,
                   int c_type) {
#ifdef GGML_USE_LLAMAFILE
    return !caravan_row_by_row && llamafile_sgemm(params, m, n, k, a, lda, b, ldb, c, ldc, a_type, b_type, c_type);
#else
    return false;
#endif
}

bool caravan_mul_mat_tiled(const struct ggml_compute_params * params, struct ggml_tensor * dst) {
    return !caravan_row_by_row && ggml_compute_forward_mul_mat_tiled(params, dst);
}

bool caravan_mul_mat_id_tiled(const struct ggml_compute_params * params, struct ggml_tensor * dst, int64_t expert,
                              int64_t row_count, const int32_t * rows, char * scratch) {
    return !caravan_row_by_row && ggml_compute_forward_mul_mat_id_tiled(params, dst, expert, row_count, rows, scratch);
}
