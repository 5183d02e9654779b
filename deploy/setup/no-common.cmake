# Included right after llama-cpp-python's project() call. libllama-common is more than half of the build, and the Python
# package neither installs nor loads it.
set(LLAMA_BUILD_COMMON OFF)
