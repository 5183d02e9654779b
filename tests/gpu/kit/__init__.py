"""Builds, tests and measures on a host with CUDA and without a network: `tests/gpu/kit.sh`, see docs/gpu-kit.md."""
