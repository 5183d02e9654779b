// Two or three rows that are left over by groups of four, as a group whose other rows are zeros.
//
// ggml multiplies repacked weights by groups of four rows, and by what is left row by row. A group takes less time than
// three rows, with AVX-512 also less than two: decision 0080 has the times. llama.cmake compiles repack.cpp so that it
// calls these functions.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace caravan {

constexpr int64_t GROUP_ROWS = 4;

// So many rows are computed as a group. A group was not measured with other instructions.
#if defined(__AVX512F__)
constexpr int64_t LEAST_ROWS = 2;
#elif defined(__AVX2__)
constexpr int64_t LEAST_ROWS = 3;
#else
constexpr int64_t LEAST_ROWS = GROUP_ROWS;
#endif

// Returns how many rows are left over and computed as a group, or 0.
// Further planes would lie where the group's other rows are.
inline int64_t rest_of_rows(int64_t rows, int64_t planes) {
    const int64_t rest = rows % GROUP_ROWS;
    return planes == 1 && rest >= LEAST_ROWS ? rest : 0;
}

// Calls ``quantize(group)`` for a copy of ``rest`` rows of ``columns`` floats, ``stride`` bytes apart, and of zeros.
template <typename Quantize>
void quantize_rest(const char * rows, size_t stride, int64_t rest, int64_t columns, Quantize quantize) {
    std::vector<float> group(GROUP_ROWS * columns);
    for (int64_t row = 0; row < rest; row++) {
        std::memcpy(group.data() + row * columns, rows + row * stride, columns * sizeof(float));
    }
    quantize(group.data());
}

// Writes ``columns`` products of ``rest`` rows to ``out``, where rows are ``stride`` bytes apart.
// ``multiply(first, count, product, distance)`` writes ``count`` products of each row of the group.
template <typename Multiply>
void multiply_rest(char * out, size_t stride, int64_t rest, int64_t columns, Multiply multiply) {
    // A multiple of the columns that are packed together.
    constexpr int64_t AT_ONCE = 64;
    float product[GROUP_ROWS * AT_ONCE];
    for (int64_t first = 0; first < columns; first += AT_ONCE) {
        const int64_t count = std::min(AT_ONCE, columns - first);
        multiply(first, count, product, AT_ONCE);
        for (int64_t row = 0; row < rest; row++) {
            std::memcpy(out + row * stride + first * sizeof(float), product + row * AT_ONCE, count * sizeof(float));
        }
    }
}

}  // namespace caravan
