"""A toy model that obeys llama.cpp's rules for the cache. Must need neither a model file nor llama_cpp."""
