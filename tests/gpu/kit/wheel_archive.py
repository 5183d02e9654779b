"""Wheels in one archive: compressed file by file, as they come, they take half as much again."""

import io
import tarfile
import zipfile
from pathlib import Path


def archive_wheels(folder: Path, target: Path) -> None:
    """Write the wheels of ``folder``, stored as they are, into an archive that is compressed as a whole."""
    with tarfile.open(target, "w:xz") as archive:
        for wheel in sorted(folder.glob("*.whl")):
            loose = _loose(wheel)
            member = tarfile.TarInfo(wheel.name)
            member.size = len(loose)
            archive.addfile(member, io.BytesIO(loose))


def _loose(wheel: Path) -> bytes:
    """Return a wheel whose files are stored as they are. What it tells of them are digests of their content."""
    target = io.BytesIO()
    with zipfile.ZipFile(wheel) as compressed, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as stored:
        for info in compressed.infolist():
            member = zipfile.ZipInfo(info.filename, info.date_time)
            member.external_attr = info.external_attr
            stored.writestr(member, compressed.read(info))
    return target.getvalue()
