"""What `make release` packs by itself. It checks the rest each time, by installing it."""

import tarfile
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from deploy.tools import ROOT, tool_path

from caravan_proto import __version__

# Builds, runs and saves as podman does, and writes down what it was asked for.
_PODMAN = """#!/bin/sh
echo "$@" >> "$LOG"
case "$1" in
    run) name=${3#localhost/}; name=${name%-serve:*}; echo "${name%:*} $VERSION" ;;
    save) : > "$3" ;;
esac
"""


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT / "deploy/setup")
    return import_module("release_parts")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The calls of a stand-in for podman, which prints $VERSION as the images' version."""
    program = tmp_path / "bin" / "podman"
    program.parent.mkdir()
    program.write_text(_PODMAN)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    monkeypatch.setenv("VERSION", __version__)
    return tmp_path / "log"


def _contents(archive: Path) -> dict[str, bytes]:
    found = {}
    with tarfile.open(archive) as tar:
        for name in tar.getnames():
            content = tar.extractfile(name)
            assert content is not None
            found[name] = content.read()
    return found


def test_a_chart_that_is_packed_without_helm_has_what_helm_packs(parts: Any, tmp_path: Path) -> None:
    with_helm, without = tmp_path / "with", tmp_path / "without"
    with_helm.mkdir()
    without.mkdir()
    expected = _contents(parts.package_chart(with_helm, __version__, tool_path("helm")))
    found = _contents(parts.package_chart(without, __version__, None))
    assert found.keys() == expected.keys()
    # helm writes Chart.yaml anew.
    assert {name for name in found if found[name] != expected[name]} <= {"caravan/Chart.yaml"}


def test_a_chart_of_another_version_is_refused(parts: Any, tmp_path: Path) -> None:
    with pytest.raises(parts.ReleaseError, match=r"is no chart of version 9\.9\.9"):
        parts.package_chart(tmp_path, "9.9.9", None)


def test_images_are_built_run_and_saved(parts: Any, log: Path, tmp_path: Path) -> None:
    saved = parts.build_images(tmp_path, __version__, "podman")
    assert [path.name for path in saved] == [f"caravan-{part}-{__version__}.tar" for part in parts.IMAGES]
    calls = log.read_text().splitlines()
    assert [call.split()[0] for call in calls] == [*["build"] * 3, *["run", "save"] * 3]
    assert f"--tag localhost/caravan-shard:{__version__} ." in calls[1]


@pytest.mark.usefixtures("log")
def test_an_image_of_another_version_is_refused(parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERSION", "0.0.1")
    with pytest.raises(parts.ReleaseError, match=r"prints 'caravan-router 0\.0\.1\\n' as its version"):
        parts.build_images(tmp_path, __version__, "podman")


def test_no_image_is_built_where_no_program_can(parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a docker without its daemon."""
    program = tmp_path / "docker"
    program.write_text("#!/bin/sh\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert parts.image_builder() is None


DIGEST = f"sha256:{'0123456789abcdef' * 4}"
# Each notes its words; those that push say the digest, buildah and podman in a file.
_PUSHES = f"""#!/bin/sh
echo "${{0##*/}} $@" >> "$LOG"
if [ "$2" = --digestfile ]; then echo {DIGEST} > "$3"; else echo "Digest: {DIGEST}"; fi
"""


@pytest.fixture
def publishing(parts: Any, log: Path) -> Any:
    """The module that publishes, with stand-ins for the programs that it runs."""
    for name in ("helm", "podman", "docker", "cosign"):
        program = log.parent / "bin" / name
        program.write_text(_PUSHES)
        program.chmod(0o755)
    return import_module("release_publish")


@pytest.mark.parametrize("builder", ["podman", "docker"])
def test_the_chart_and_the_images_are_pushed_and_signed_by_their_digests(
    publishing: Any, parts: Any, log: Path, tmp_path: Path, builder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COSIGN_KEY", "cosign.key")
    chart = publishing.publish_chart(tmp_path / "caravan.tgz", "registry.example.com/ml", log.parent / "bin/helm")
    images = publishing.publish_images("registry.example.com/ml", __version__, builder)
    assert chart == f"registry.example.com/ml/charts/caravan@{DIGEST}"
    assert images == [f"registry.example.com/ml/caravan-{part}@{DIGEST}" for part in parts.IMAGES]
    assert publishing.sign([chart, *images], tmp_path / "x.cdx.json")
    calls = log.read_text().splitlines()
    assert f"helm push {tmp_path}/caravan.tgz oci://registry.example.com/ml/charts" in calls
    for reference in (chart, *images):
        assert f"cosign sign --yes --key cosign.key {reference}" in calls
        attached = f"--type cyclonedx --predicate {tmp_path}/x.cdx.json {reference}"
        assert f"cosign attest --yes --key cosign.key {attached}" in calls


def test_without_cosign_nothing_is_signed_and_without_helm_nothing_is_pushed(
    publishing: Any, parts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not publishing.sign(["x"], tmp_path / "x.cdx.json")
    with pytest.raises(parts.ReleaseError, match="PUBLISH needs helm"):
        publishing.publish_chart(tmp_path / "caravan.tgz", "registry.example.com/ml", None)
