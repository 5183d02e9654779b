# What is compiled, by what it needs.

# Functions for rows of logits, and the number that the shard compares. They need nothing of ggml.
set(CARAVAN_ROW_SOURCES abi draw_rows draw_weighed logprob_rows)

# What takes the place of ggml's code, or reads its graphs.
set(CARAVAN_GGML_SOURCES row_by_row flash_attention take_states)

# Instead of OpenMP's barrier; it needs Linux.
set(CARAVAN_BARRIER_SOURCES barrier)
