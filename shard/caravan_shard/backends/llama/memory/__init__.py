"""Contexts of llama.cpp: their cells, and the states of sequences."""
