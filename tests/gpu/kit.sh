#!/bin/sh
# Builds, tests and measures on a host with CUDA and without a network: see docs/gpu-kit.md, or kit.sh --help.
cd "$(dirname "$0")/../.." || exit
PYTHONUNBUFFERED=1 PYTHONPATH=tests exec "${PYTHON:-python3}" -m gpu.kit "$@"
