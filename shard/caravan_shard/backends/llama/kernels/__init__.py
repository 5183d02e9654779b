"""Calls the kernels that Caravan adds to llama.cpp, where a build has them."""
