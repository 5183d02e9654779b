"""Caravan's functions for rows of logits, compiled: what a shard draws and computes log probabilities with.

A llama.cpp that was built with Caravan's kernels has them already. This package is for others, such as a ready-made
wheel of llama-cpp-python.
"""

from pathlib import Path

LIBRARY = Path(__file__).with_name("libcaravan_rows.so")
"""The library; its path is there only where the package is installed, not in a checkout."""
