// Rows of logits of all kinds: of one token and of many, with equal ones, NaN and infinities.

#pragma once

#include "random.h"

static const int64_t SIZES[] = {1,  2,  3,   4,   5,   7,   8,   9,   15,   16,   17,   31,   33,    63,
                                64, 65, 100, 127, 129, 300, 511, 513, 1000, 4099, 8192, 8193, 20000, 49152};

enum { NORMAL, FLAT, EQUAL, PEAKED, HUGE_ONES, MASKED, NOTHING, WITH_NAN, INFINITE, BOTH_INFINITIES, KINDS };

static void fill_row(float * row, int64_t size) {
    const int kind = (int) below(KINDS);
    for (int64_t id = 0; id < size; id++) {
        switch (kind) {
        case FLAT:
            row[id] = normal() * 0.01f;
            break;
        case EQUAL:
            row[id] = 2.5f;
            break;
        case HUGE_ONES:
            row[id] = normal() * 1e37f;
            break;
        case MASKED:
            row[id] = below(20) ? -INFINITY : normal();
            break;
        case NOTHING:
            row[id] = -INFINITY;
            break;
        default:
            row[id] = normal() * 4.0f;
        }
    }
    const int64_t at = below(2) ? below(size) : size - 1;
    if (kind == PEAKED) {
        row[at] = 60.0f;
    } else if (kind == WITH_NAN) {
        row[at] = NAN;
    } else if (kind == INFINITE || kind == BOTH_INFINITIES) {
        row[at] = INFINITY;
    }
    if (kind == BOTH_INFINITIES) {
        row[below(size)] = -INFINITY;
    }
}
