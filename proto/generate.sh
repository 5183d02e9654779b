#!/bin/sh
# Generates the Python code of the .proto files into OUT (default: where it is committed).
set -eu
cd "$(dirname "$0")"
out=${1:-.}
python=${PYTHON:-../.venv/bin/python}
PATH="$(dirname "$(command -v "$python")"):$PATH"
"$python" -m grpc_tools.protoc -I . --python_out="$out" --mypy_out="quiet:$out" caravan_proto/shard/v1/*.proto
"$python" -m grpc_tools.protoc -I . --grpc_python_out="$out" --mypy_grpc_out="quiet:$out" caravan_proto/shard/v1/shard.proto
