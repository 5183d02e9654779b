// A row of logits that is to be drawn, and the ways to draw one. Each returns the token, or -1 if the row is left.

#pragma once

#include "logits.h"

// Must be what caravan_shard/backends/llama/kernels/joint_draw.py has.
struct caravan_row {
    int64_t index;         // of the row of logits
    const uint8_t * mask;  // a bit for each token that may be chosen, the lowest bit of a byte first; null for all
    double number;         // in [0, 1): selects the token
    double xtc_threshold;  // infinite without XTC
    double temperature;    // 0: the most likely token
    double top_k;          // 0: off
    double typical_p;      // 1: off; only with top_k
    double top_p;          // 1: off
    double min_p;          // 0: off
    double reach;          // how far below the highest logit candidates may be, divided by the temperature
};

// Scaled logits so near to the border of min_p, as a share of it, may be on either side: 4 ulp.
#define MIN_P_ROUNDING 0x1p-21

// Draw among all tokens.
HIDDEN int32_t caravan_draw_of_all(const struct logits * logits, const struct caravan_row * row,
                                   const struct parts * parts);

// Draw among the likeliest, that together are top_p likely and of which min_p may take away some.
HIDDEN int32_t caravan_draw_of_likeliest(const struct logits * logits, const struct caravan_row * row,
                                         const struct parts * parts);
