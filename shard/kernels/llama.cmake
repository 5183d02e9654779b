# Included right after llama-cpp-python's project() call.

# libllama-common is more than half of the build, and the Python package neither installs nor loads it.
set(LLAMA_BUILD_COMMON OFF)

# libmtmd, which turns pictures and sound into embeddings, starts ffprobe for bytes that it does not know, unless it is
# told that there is no video.
set(MTMD_VIDEO OFF CACHE BOOL "" FORCE)

# Some compilers link the C++ library into each library that they make. Its symbols stay there, or they would be mixed with
# those of another copy in the process, such as gRPC's, and no model could be loaded.
if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
    add_link_options("LINKER:--exclude-libs,libstdc++.a")
endif()

set(CARAVAN_KERNELS "${CMAKE_CURRENT_LIST_DIR}")
set(CARAVAN_GGML "${CMAKE_SOURCE_DIR}/vendor/llama.cpp/ggml/src")

# Puts our own code into each of ggml's backends for CPUs, which are compiled for the processors that they run on:
# row_by_row.c, between the code that runs a graph and the products, flash_attention.c, barrier.c, and the functions for
# rows of logits and for states, which nothing of ggml calls. abi.c has the number that the shard compares.
function(caravan_add_sources)
    include("${CARAVAN_KERNELS}/sources.cmake")
    set(names ${CARAVAN_ROW_SOURCES} ${CARAVAN_GGML_SOURCES})
    set(runs_graphs "${CARAVAN_GGML}/ggml-cpu/ggml-cpu.c")
    if(CMAKE_SYSTEM_NAME STREQUAL "Linux")
        list(APPEND names ${CARAVAN_BARRIER_SOURCES})
        set(runs_graphs "${CMAKE_BINARY_DIR}/caravan/ggml-cpu.c")
        caravan_copy_with_barrier("${runs_graphs}")
    endif()
    list(TRANSFORM names REPLACE "(.+)" "${CARAVAN_KERNELS}/src/\\1.c" OUTPUT_VARIABLE ours)
    # Not of the targets: ggml's own files must not find our headers.
    set_property(SOURCE ${ours} DIRECTORY "${CARAVAN_GGML}" PROPERTY INCLUDE_DIRECTORIES "${CARAVAN_KERNELS}/include")
    get_property(targets DIRECTORY "${CARAVAN_GGML}" PROPERTY BUILDSYSTEM_TARGETS)
    foreach(target IN LISTS targets)
        if(target MATCHES "^ggml-cpu" AND NOT target MATCHES "-feats$")
            get_target_property(sources ${target} SOURCES)
            list(TRANSFORM sources REPLACE "^ggml-cpu/ggml-cpu\\.c$" "${runs_graphs}")
            set_property(TARGET ${target} PROPERTY SOURCES ${sources})
            target_sources(${target} PRIVATE ${ours})
        endif()
    endforeach()
    set_property(
        SOURCE "${runs_graphs}" DIRECTORY "${CARAVAN_GGML}" APPEND PROPERTY COMPILE_DEFINITIONS
        llamafile_sgemm=caravan_sgemm
        ggml_compute_forward_mul_mat_tiled=caravan_mul_mat_tiled
        ggml_compute_forward_mul_mat_id_tiled=caravan_mul_mat_id_tiled
        ggml_compute_forward_flash_attn_ext=caravan_flash_attn_ext
    )
endfunction()
cmake_language(DEFER CALL caravan_add_sources)

# Writes ggml-cpu.c to ``copy`` with our barrier instead of OpenMP's, which needs counters that no other file sees.
function(caravan_copy_with_barrier copy)
    file(READ "${CARAVAN_GGML}/ggml-cpu/ggml-cpu.c" code)
    set(theirs "    #pragma omp barrier\n")
    string(FIND "${code}" "${theirs}" first)
    string(FIND "${code}" "${theirs}" last REVERSE)
    if(first EQUAL -1 OR NOT first EQUAL last)
        message(FATAL_ERROR "ggml-cpu.c does not have one barrier of OpenMP, as that of the pinned llama.cpp has")
    endif()
    set(ours "    caravan_wait_for_all(&tp->n_barrier, &tp->n_barrier_passed, n_threads);\n")
    string(REPLACE "${theirs}" "${ours}" code "${code}")
    file(WRITE "${copy}" "#include \"${CARAVAN_KERNELS}/include/barrier.h\"\n${code}")
endfunction()
