#!/usr/bin/env bash
# Builds the images localhost/caravan-router and localhost/caravan-shard with buildah, and tags them with the version.
# Its arguments are more flags of `buildah bud`. The files of the images have the time of the checkout's commit.
set -euo pipefail
cd "$(dirname "$0")/../.."
version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' proto/caravan_proto/__init__.py)
for target in router shard; do
    buildah bud --format docker --layers --timestamp "$(git log -1 --format=%ct)" \
        --build-arg VERSION="$version" --build-arg REVISION="$(git describe --always --dirty --abbrev=40)" \
        --file deploy/images/Containerfile --target "$target" --tag "localhost/caravan-$target:$version" "$@" .
done
