"""Sampling by llama.cpp: its filters, and candidates that it finds on a device."""
