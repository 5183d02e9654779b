#!/bin/sh
# Rehearses the kit on the CPU, in a copy of the repository and without a network: rehearse.sh [ARGUMENTS OF kit.sh].
# Before that, with a network: PYTHON=.venv/bin/python tests/gpu/kit.sh pack --python 3.11, or the version of python3.
set -eu
cd "$(dirname "$0")/../.."
copy=.cache/gpu-kit/copy
mkdir -p "$copy/.cache/gpu-kit"
git ls-files -z --cached --others --exclude-standard | tar --null --files-from - --create | tar --extract -C "$copy"
cp -rlf .cache/gpu-kit/carried "$copy/.cache/gpu-kit/"
# A namespace of its own has no route to anywhere, and its loopback is down at first.
export OUT="$PWD/.cache/gpu-kit/rehearsed"
# shellcheck disable=SC2016 # expanded there
exec unshare --map-root-user --net sh -c 'ip link set lo up; exec "$@"' sh "$copy/tests/gpu/kit.sh" --rehearsal "$@"
