"""Prepared samples as bytes: JSON for the structure, raw bytes for numbers. Decoding runs no code that the bytes
name."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import json
import struct
import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from megatron_wrap.errors import DataError

_HEAD = struct.Struct("<II")
"""Header of an encoded sample: the CRC-32 of everything after these eight bytes, and the length of the JSON. The
numbers follow the JSON."""
_MANY = 8
"""Smallest length of a list that is stored as an array."""
_KINDS = "biufcSUMm"
"""Kinds of numpy's dtypes that contain no Python objects."""


def encode(sample: Any) -> bytes:
    """A sample of plain values, dates, arrays, tensors, and dataclasses or named tuples of these.

    Raises:
        DataError: it contains anything else.
    """
    numbers = bytearray()
    structure = json.dumps(_encoded(sample, numbers), separators=(",", ":")).encode()
    content = structure + numbers
    return _HEAD.pack(zlib.crc32(content), len(structure)) + content


def decode(content: bytes) -> Any:
    """The sample that was passed to `encode`.

    Raises:
        ValueError: the bytes are damaged.
    """
    if len(content) < _HEAD.size:
        raise ValueError("truncated")
    checksum, length = _HEAD.unpack_from(content)
    body = content[_HEAD.size :]
    if zlib.crc32(body) != checksum:
        raise ValueError("another checksum")
    try:
        return _decoded(json.loads(body[:length]), memoryview(body)[length:])
    except (KeyError, TypeError, AttributeError, IndexError, ArithmeticError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _encoded(value: Any, numbers: bytearray) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if kind is list:
        return _encoded_list(value, numbers)
    tag = next((tag for owner, tag in _CONTAINERS.items() if kind is owner), None)
    if tag is not None:
        return {tag: [_encoded(item, numbers) for item in value]}
    if kind is dict:
        return {"dict": [[_encoded(key, numbers), _encoded(item, numbers)] for key, item in value.items()]}
    if kind in (bytes, bytearray):
        return {kind.__name__: _stored(bytes(value), numbers)}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in _KINDS and value.dtype.names is None:
        array = np.asarray(value)
        tag = "array" if isinstance(value, np.ndarray) else "scalar"
        return {tag: [array.dtype.str, list(array.shape), *_stored(array.tobytes(), numbers)]}
    if kind is torch.Tensor and value.layout is torch.strided and not value.is_quantized:
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"tensor": [str(value.dtype), list(value.shape), *_stored(flat, numbers)]}
    if kind in (datetime.datetime, datetime.date, datetime.time):
        return {kind.__name__: value.isoformat()}
    if kind is decimal.Decimal:
        return {"decimal": str(value)}
    names = _field_names(kind)
    if names is not None and _loaded_class(kind.__module__, kind.__qualname__) is kind:
        fields = [_encoded(getattr(value, name), numbers) for name in names]
        return {"object": [kind.__module__, kind.__qualname__, fields]}
    raise DataError(
        f"a prepared sample contains a {kind.__module__}.{kind.__qualname__}, which the tokenized cache cannot store; "
        "let prepare_sample return plain values, arrays, tensors and dataclasses of modules, or set "
        "megatron_wrap.data.cache_dir to null"
    )


def _encoded_list(values: list[Any], numbers: bytearray) -> Any:
    kinds = set(map(type, values))
    if len(values) >= _MANY and kinds in ({int}, {float}):
        code = "i8" if kinds == {int} else "f8"
        try:
            return {code: _stored(np.array(values, dtype=f"<{code}").tobytes(), numbers)}
        except OverflowError:
            return values
    return [_encoded(item, numbers) for item in values]


def _stored(content: bytes, numbers: bytearray) -> list[int]:
    begin = len(numbers)
    numbers += content
    return [begin, len(numbers)]


def _decoded(value: Any, numbers: memoryview) -> Any:
    if isinstance(value, list):
        return [_decoded(item, numbers) for item in value]
    if not isinstance(value, dict):
        return value
    ((tag, content),) = value.items()
    return _DECODERS[tag](content, numbers)


def _array(content: Any, numbers: memoryview) -> np.ndarray:
    name, shape, begin, end = content
    dtype = np.dtype(name)
    if dtype.kind not in _KINDS:
        raise ValueError(f"dtype {name}")
    return np.frombuffer(numbers[begin:end], dtype=dtype).reshape(shape).copy()


def _tensor(content: Any, numbers: memoryview) -> torch.Tensor:
    name, shape, begin, end = content
    dtype = getattr(torch, name.removeprefix("torch."))
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name}")
    if begin == end:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(numbers[begin:end]), dtype=dtype).reshape(shape)


def _object(content: Any, numbers: memoryview) -> Any:
    """An instance of a dataclass or named tuple of a module that is loaded, without a call of its methods."""
    module, name, fields = content
    kind = _loaded_class(module, name)
    names = None if kind is None else _field_names(kind)
    if kind is None or names is None or len(names) != len(fields):
        raise ValueError(f"{module}.{name} is not the class that was stored")
    values = [_decoded(item, numbers) for item in fields]
    if issubclass(kind, tuple):
        return tuple.__new__(kind, values)
    created = object.__new__(kind)
    for field, item in zip(names, values, strict=True):
        object.__setattr__(created, field, item)  # also of a frozen class, and past one that defines it
    return created


def _field_names(kind: Any) -> list[str] | None:
    """Names of the fields of a dataclass or named tuple; None for another class."""
    if dataclasses.is_dataclass(kind):
        return [field.name for field in dataclasses.fields(kind)]
    return list(kind._fields) if issubclass(kind, tuple) and hasattr(kind, "_fields") else None


def _loaded_class(module: str, name: str) -> Any:
    value = vars(sys.modules[module]).get(name) if module in sys.modules else None
    return value if isinstance(value, type) else None


_CONTAINERS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_DECODERS: dict[str, Callable[[Any, memoryview], Any]] = {
    "tuple": lambda content, numbers: tuple(_decoded(item, numbers) for item in content),
    "set": lambda content, numbers: {_decoded(item, numbers) for item in content},
    "frozenset": lambda content, numbers: frozenset(_decoded(item, numbers) for item in content),
    "dict": lambda content, numbers: {_decoded(key, numbers): _decoded(item, numbers) for key, item in content},
    "bytes": lambda content, numbers: bytes(numbers[content[0] : content[1]]),
    "bytearray": lambda content, numbers: bytearray(numbers[content[0] : content[1]]),
    "i8": lambda content, numbers: np.frombuffer(numbers[content[0] : content[1]], "<i8").tolist(),
    "f8": lambda content, numbers: np.frombuffer(numbers[content[0] : content[1]], "<f8").tolist(),
    "array": _array,
    "scalar": lambda content, numbers: _array(content, numbers)[()],
    "tensor": _tensor,
    "datetime": lambda content, _: datetime.datetime.fromisoformat(content),
    "date": lambda content, _: datetime.date.fromisoformat(content),
    "time": lambda content, _: datetime.time.fromisoformat(content),
    "decimal": lambda content, _: decimal.Decimal(content),
    "object": _object,
}
