"""The version of llama.cpp that the benchmarks build."""

from importlib.metadata import version

from bench.paths import pinned_version


def test_peers_are_built_of_the_pinned_version() -> None:
    assert pinned_version() == version("llama-cpp-python")
