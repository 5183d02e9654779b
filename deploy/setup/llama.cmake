# Included right after llama-cpp-python's project() call.

# libllama-common is more than half of the build, and the Python package neither installs nor loads it.
set(LLAMA_BUILD_COMMON OFF)

# libmtmd, which turns pictures and sound into embeddings, starts ffprobe for bytes that it does not know, unless it is
# told that there is no video.
set(MTMD_VIDEO OFF CACHE BOOL "" FORCE)

# Puts our own code into each of ggml's backends for CPUs, which are compiled for the processors that they run on:
# row_by_row.c, between the code that runs a graph and the products, flash_attention.c, and the functions for rows of
# logits and for states, which nothing of ggml calls.
function(caravan_add_sources)
    set(folder "${CMAKE_SOURCE_DIR}/vendor/llama.cpp/ggml/src")
    get_property(targets DIRECTORY "${folder}" PROPERTY BUILDSYSTEM_TARGETS)
    foreach(target IN LISTS targets)
        if(target MATCHES "^ggml-cpu" AND NOT target MATCHES "-feats$")
            foreach(name IN ITEMS row_by_row flash_attention draw_rows draw_weighed logprob_rows take_states)
                target_sources(${target} PRIVATE "${CARAVAN_SETUP}/${name}.c")
            endforeach()
        endif()
    endforeach()
    set_property(
        SOURCE "${folder}/ggml-cpu/ggml-cpu.c" DIRECTORY "${folder}" APPEND PROPERTY COMPILE_DEFINITIONS
        llamafile_sgemm=caravan_sgemm
        ggml_compute_forward_mul_mat_tiled=caravan_mul_mat_tiled
        ggml_compute_forward_mul_mat_id_tiled=caravan_mul_mat_id_tiled
        ggml_compute_forward_flash_attn_ext=caravan_flash_attn_ext
    )
endfunction()
set(CARAVAN_SETUP "${CMAKE_CURRENT_LIST_DIR}")
cmake_language(DEFER CALL caravan_add_sources)
