"""llama.cpp by its C API."""
