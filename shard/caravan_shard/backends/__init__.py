"""Who computes: llama.cpp, or a toy model for tests and simulations."""
