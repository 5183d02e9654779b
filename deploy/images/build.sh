#!/usr/bin/env bash
# Builds the images localhost/caravan-router, -shard and -serve, and tags them with the version.
# BUILDER is buildah, podman or docker. The arguments are more flags of its build command. With the first two, all files
# have the same time, so that equal files make equal images.
set -euo pipefail
cd "$(dirname "$0")/../.."
builder=${BUILDER:-buildah}
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' proto/caravan_proto/__init__.py)
same=(--format docker --layers --timestamp 0)
[ "$builder" != docker ] || same=()
for target in router shard serve; do
    "$builder" build "${same[@]}" \
        --build-arg VERSION="$version" --build-arg REVISION="$(git describe --always --dirty --abbrev=40)" \
        --file deploy/images/Containerfile --target "$target" --tag "localhost/caravan-$target:$version" "$@" .
done
