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
    set(repacks "${CMAKE_BINARY_DIR}/caravan/repack.cpp")
    caravan_copy_with_groups("${repacks}")
    list(TRANSFORM names REPLACE "(.+)" "${CARAVAN_KERNELS}/src/\\1.c" OUTPUT_VARIABLE ours)
    # Not of the targets: ggml's own files must not find our headers.
    set_property(SOURCE ${ours} DIRECTORY "${CARAVAN_GGML}" PROPERTY INCLUDE_DIRECTORIES "${CARAVAN_KERNELS}/include")
    get_property(targets DIRECTORY "${CARAVAN_GGML}" PROPERTY BUILDSYSTEM_TARGETS)
    foreach(target IN LISTS targets)
        if(target MATCHES "^ggml-cpu" AND NOT target MATCHES "-feats$")
            get_target_property(sources ${target} SOURCES)
            caravan_compile_instead(sources "ggml-cpu/ggml-cpu.c" "${runs_graphs}")
            caravan_compile_instead(sources "ggml-cpu/repack.cpp" "${repacks}")
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

# Replaces the file ``theirs``, which the list ``files`` must have, by ``ours``.
function(caravan_compile_instead files theirs ours)
    list(FIND ${files} "${theirs}" place)
    if(place EQUAL -1)
        message(FATAL_ERROR "llama.cpp does not compile ${theirs}, as the pinned one does, but:\n${${files}}")
    endif()
    list(REMOVE_AT ${files} ${place})
    list(INSERT ${files} ${place} "${ours}")
    set(${files} "${${files}}" PARENT_SCOPE)
endfunction()

# Replaces ``theirs``, which the variable ``code`` must have once, by ``ours``.
function(caravan_replace code theirs ours)
    string(FIND "${${code}}" "${theirs}" first)
    string(FIND "${${code}}" "${theirs}" last REVERSE)
    if(first EQUAL -1 OR NOT first EQUAL last)
        message(FATAL_ERROR "llama.cpp does not have once, as the pinned one has:\n${theirs}")
    endif()
    string(REPLACE "${theirs}" "${ours}" changed "${${code}}")
    set(${code} "${changed}" PARENT_SCOPE)
endfunction()

# Writes ggml-cpu.c to ``copy`` with our barrier instead of OpenMP's, which needs counters that no other file sees.
function(caravan_copy_with_barrier copy)
    file(READ "${CARAVAN_GGML}/ggml-cpu/ggml-cpu.c" text)
    caravan_replace(text
        "    #pragma omp barrier\n"
        "    caravan_wait_for_all(&tp->n_barrier, &tp->n_barrier_passed, n_threads);\n"
    )
    file(WRITE "${copy}" "#include \"${CARAVAN_KERNELS}/include/barrier.h\"\n${text}")
endfunction()

# Writes repack.cpp to ``copy`` so that it computes two or three rows that are left over as a group of four: there is
# room for the group's other rows, all rows are quantized together, and multiplied together.
function(caravan_copy_with_groups copy)
    file(READ "${CARAVAN_GGML}/ggml-cpu/repack.cpp" text)
    set(size "ggml_row_size(PARAM_TYPE, ggml_nelements(op->src[1]))")
    caravan_replace(text
        "size = ${size};\n                    return true;\n"
        "size = ${size} + 2 * ggml_row_size(PARAM_TYPE, op->src[1]->ne[0]);\n                    return true;\n"
    )
    set(theirs "            const int64_t i11_processed = ne11 - ne11 % 4;\n")
    caravan_replace(text "${theirs}" "${theirs}
            if (const int64_t rest = caravan::rest_of_rows(ne11, ne12)) {
                if (ith == (ne11 / 4) % nth) {
                    const auto quantize = [&](float * group) {
                        ggml_quantize_mat_t<INTER_SIZE, PARAM_TYPE>(group, wdata_ptr + i11_processed * nbw1, 4, ne10);
                    };
                    caravan::quantize_rest(data_ptr + i11_processed * nb11, nb11, rest, ne10, quantize);
                }
                continue;
            }
")
    set(theirs "        for (int iter = nrows - (nrows % 4); iter < nrows; iter++) {\n")
    caravan_replace(text "${theirs}" "
        if (const int64_t rest = caravan::rest_of_rows(nrows, ne12)) {
            const int64_t done = nrows - rest;
            const auto multiply = [&](int64_t first, int64_t count, float * product, int64_t distance) {
                gemm<BLOC_TYPE, INTER_SIZE, NB_COLS, PARAM_TYPE>(ne00, product, distance,
                                                                 src0_ptr + (src0_start + first) * nb01,
                                                                 src1_ptr + done * src1_col_stride, 4, count);
            };
            caravan::multiply_rest(dst_ptr + done * nb1 + src0_start * nb0, nb1, rest, ncols, multiply);
            return;
        }
${theirs}")
    file(WRITE "${copy}" "#include \"${CARAVAN_KERNELS}/include/rest_of_rows.h\"\n${text}")
endfunction()
