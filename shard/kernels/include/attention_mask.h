// Which cells a row of queries sees: those whose mask, a half that is added to the score, is not minus infinity.

#pragma once

#include <stdint.h>
#include <string.h>

// Cells whose visibility is looked up together.
#define SPAN 64

// Minus infinity.
#define HIDDEN_CELL 0xfc00
#define FOUR_HIDDEN_CELLS 0xfc00fc00fc00fc00

// Which of SPAN cells are visible, a bit for each. ``masked``: whether visible ones have another mask than 0.
struct span {
    uint64_t visible;
    int masked;
};

// Return what a row sees of ``count`` cells.
static struct span span_of(const uint16_t * row, int64_t count) {
    uint64_t fours[SPAN / 4], any = 0, all = ~(uint64_t) 0;
    if (count == SPAN) {
        memcpy(fours, row, sizeof fours);
        for (int four = 0; four < SPAN / 4; four++) {
            any |= fours[four];
            all &= fours[four];
        }
        if (any == 0 || (any == FOUR_HIDDEN_CELLS && all == any)) {
            return (struct span) {any == 0 ? ~(uint64_t) 0 : 0, 0};
        }
    }
    struct span span = {0};
    for (int64_t cell = 0; cell < count; cell++) {
        const uint64_t is_visible = row[cell] != HIDDEN_CELL;
        span.visible |= is_visible << cell;
        span.masked |= is_visible && row[cell] != 0;
    }
    return span;
}
