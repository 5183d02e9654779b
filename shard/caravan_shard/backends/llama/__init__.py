"""llama.cpp through its C API.

The only room that may import llama_cpp, and never its `Llama`, `LlamaBatch` or `LlamaContext` classes. llama.cpp ends
the process on several misuses: whatever can reach one is ruled out or asserted before the call.
"""
