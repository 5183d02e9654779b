# Included right after llama-cpp-python's project() call: more than half of its build is libllama-common, which the
# Python package neither installs nor loads.
set(LLAMA_BUILD_COMMON OFF)
