"""How `make release PUBLISH=REGISTRY/FOLDER` puts the chart and the images into a registry, and signs them.

What is pushed is signed by its digest, and the list of components attached to it: with cosign, if it is installed, and
the key that COSIGN_KEY names, or else the identity that cosign finds. Registries' logins are those of the programs.
"""

import os
import re
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

from release_parts import IMAGES, ReleaseError, run

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def publish_chart(archive: Path, registry: str, helm: Path | None) -> str:
    """Push the chart as ``registry``/charts/caravan; return its reference with a digest. Raises ReleaseError."""
    if helm is None:
        raise ReleaseError("PUBLISH needs helm to push the chart")
    said = run([helm, "push", archive, f"oci://{registry}/charts"])
    return f"{registry}/charts/caravan@{_digest_in(said, 'helm push')}"


def publish_images(registry: str, version: str, builder: str) -> list[str]:
    """Push the images that are built; return their references with digests. Raises ReleaseError."""
    published = []
    for part in IMAGES:
        local, remote = f"localhost/caravan-{part}:{version}", f"{registry}/caravan-{part}"
        if builder == "docker":
            run([builder, "tag", local, f"{remote}:{version}"])
            digest = _digest_in(run([builder, "push", f"{remote}:{version}"]), "docker push")
        else:
            with tempfile.NamedTemporaryFile() as file:
                run([builder, "push", "--digestfile", file.name, local, f"docker://{remote}:{version}"])
                digest = _digest_in(Path(file.name).read_text(), f"{builder} push")
        published.append(f"{remote}@{digest}")
    return published


def sign(references: Sequence[str], components: Path) -> bool:
    """Sign what is published, and attach ``components`` in CycloneDX. Return False without cosign.

    Raises ReleaseError.
    """
    cosign = shutil.which("cosign")
    if cosign is None:
        return False
    key = ["--key", os.environ["COSIGN_KEY"]] if os.environ.get("COSIGN_KEY") else []
    for reference in references:
        run([cosign, "sign", "--yes", *key, reference])
        run([cosign, "attest", "--yes", *key, "--type", "cyclonedx", "--predicate", components, reference])
    return True


def _digest_in(text: str, program: str) -> str:
    found = _DIGEST.search(text)
    if found is None:
        raise ReleaseError(f"{program} does not say which digest it has pushed:\n{text}")
    return found[0]
