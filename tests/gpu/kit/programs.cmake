# Included right after llama-cpp-python's project() call: as for its wheel, but with the programs, which need
# libllama-common. The programs load the same libraries as the Python package, so that each of them is compiled once.
include("${CMAKE_CURRENT_LIST_DIR}/../../../shard/kernels/llama.cmake")
set(LLAMA_BUILD_COMMON ON)
