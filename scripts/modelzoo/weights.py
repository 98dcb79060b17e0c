"""Reads weight files without the framework that wrote them."""

from __future__ import annotations

import io
import json
import pickle
from typing import Any, BinaryIO

import numpy as np

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_STORAGE_TYPES = {
    "FloatStorage": np.dtype("<f4"),
    "HalfStorage": np.dtype("<f2"),
    "LongStorage": np.dtype("<i8"),
    "IntStorage": np.dtype("<i4"),
}


class _Storage:
    """Placeholder for a storage until its bytes are read from the end of the file."""

    def __init__(self, dtype: np.dtype, count: int) -> None:
        self.dtype = dtype
        self.count = count
        self.data: np.ndarray | None = None


class _Tensor:
    """A view into a storage, as torch pickles it."""

    def __init__(
        self, storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]
    ) -> None:
        self.storage, self.offset, self.shape, self.stride = storage, offset, shape, stride

    def array(self) -> np.ndarray:
        assert self.storage.data is not None
        size = self.storage.dtype.itemsize
        view = np.lib.stride_tricks.as_strided(
            self.storage.data[self.offset :], self.shape, [s * size for s in self.stride]
        )
        return view.copy()


def _rebuild_tensor(storage: _Storage, offset: int, shape: Any, stride: Any, *_: Any) -> _Tensor:
    return _Tensor(storage, offset, tuple(shape), tuple(stride))


class _StateDict(dict):
    """Replaces OrderedDict: torch sets a `_metadata` attribute, which a plain dict refuses."""


class _Unpickler(pickle.Unpickler):
    """Allows only the names that a state dict needs, because a pickle may name any callable."""

    def __init__(self, stream: BinaryIO) -> None:
        super().__init__(stream)
        self.storages: dict[str, _Storage] = {}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return _StateDict
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _rebuild_tensor
        if module == "torch" and name in _STORAGE_TYPES:
            return _STORAGE_TYPES[name]
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed in a state dict")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _location, count, view = pid
        if kind != "storage" or view is not None:
            raise pickle.UnpicklingError(f"unexpected reference {kind!r}")
        return self.storages.setdefault(key, _Storage(dtype, count))


def read_legacy_pth(blob: bytes) -> dict[str, np.ndarray]:
    """A state dict of torch's format before 1.6: pickles one after another, then raw storages."""
    stream = io.BytesIO(blob)
    if _Unpickler(stream).load() != _LEGACY_MAGIC:
        raise ValueError("not a legacy torch file")
    _Unpickler(stream).load()  # protocol version
    system = _Unpickler(stream).load()
    if not system.get("little_endian", True):
        raise ValueError("a big-endian torch file")
    body = _Unpickler(stream)
    tensors = body.load()
    for key in _Unpickler(stream).load():
        storage = body.storages[key]
        count = int.from_bytes(stream.read(8), "little")
        if count != storage.count:
            raise ValueError(f"storage {key} has {count} elements instead of {storage.count}")
        storage.data = np.frombuffer(stream.read(count * storage.dtype.itemsize), storage.dtype)
    return {name: tensor.array() for name, tensor in tensors.items()}


def read_safetensors(blob: bytes) -> dict[str, np.ndarray]:
    """A .safetensors file: a length, a JSON header, raw tensors."""
    dtypes = {"F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4"}
    length = int.from_bytes(blob[:8], "little")
    header = json.loads(blob[8 : 8 + length])
    base = 8 + length
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        array = np.frombuffer(blob[base + begin : base + end], dtypes[entry["dtype"]])
        tensors[name] = array.reshape(entry["shape"])
    return tensors
