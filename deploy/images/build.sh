#!/usr/bin/env bash
# Builds the images localhost/caravan-router and localhost/caravan-shard with buildah, and tags them with the version.
# Its arguments are more flags of `buildah bud`. All files have the same time, so that equal files make equal images.
set -euo pipefail
cd "$(dirname "$0")/../.."
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' proto/caravan_proto/__init__.py)
for target in router shard; do
    buildah bud --format docker --layers --timestamp 0 \
        --build-arg VERSION="$version" --build-arg REVISION="$(git describe --always --dirty --abbrev=40)" \
        --file deploy/images/Containerfile --target "$target" --tag "localhost/caravan-$target:$version" "$@" .
done
