// Takes the last hidden states out of a graph and ends it there, so that the logits, which follow, are not computed.

#include <stdint.h>
#include <string.h>

#include "ggml-backend.h"

// Must be what caravan_shard/backends/llama/kernels/hidden_states.py has.
struct caravan_states {
    void * rows;    // room for the states
    int64_t room;   // bytes of it
    int64_t taken;  // bytes of the states of the last graph; -1 if they are no floats one after another, or do not fit
};

// A ggml_backend_sched_eval_callback. ``data``: a caravan_states. A graph without such states runs to its end.
__attribute__((visibility("default"))) bool caravan_take_states(struct ggml_tensor * node, bool ask, void * data) {
    if (ask) {
        return strcmp(node->name, "result_norm") == 0;
    }
    struct caravan_states * states = data;
    const int64_t bytes = (int64_t) ggml_nbytes(node);
    const bool fits = node->type == GGML_TYPE_F32 && ggml_is_contiguous(node) && bytes <= states->room;
    states->taken = fits ? bytes : -1;
    if (fits) {
        ggml_backend_tensor_get(node, states->rows, 0, (size_t) bytes);
    }
    return false;
}
