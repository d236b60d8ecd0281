"""Which tensors a checkpoint has: the headers of its safetensors files, and nothing of their content."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from ..errors import Misuse
from ..tensor import Tensor

_HEADER_BYTES_MAX = 100_000_000  # the limit of the format's own library

_DTYPES = {
    "BOOL": "bool",
    "U8": "u8",
    "I8": "i8",
    "I16": "i16",
    "I32": "i32",
    "I64": "i64",
    "F16": "f16",
    "BF16": "bf16",
    "F32": "f32",
    "F64": "f64",
    "F8_E4M3": "f8e4m3",
    "F8_E5M2": "f8e5m2",
}


def tensors(directory: str | Path) -> list[Tensor]:
    """All tensors of a checkpoint in a directory, by file and then in the file's order.

    Raises:
        Misuse: there is none, or a file is not safetensors.
    """
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise Misuse(
            "RegistrationMismatch",
            f"{directory} has no safetensors files to say which tensors the checkpoint has",
            remedy="Give the controller the directory of a checkpoint of this model: `checkpoint=DIRECTORY`.",
        )
    return [tensor for file in files for tensor in _header(file)]


def _header(file: Path) -> list[Tensor]:
    try:
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > _HEADER_BYTES_MAX:
                raise ValueError(f"its header has {length} bytes")
            header = json.loads(opened.read(length))
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return [Tensor(name, _DTYPES[entry["dtype"]], tuple(entry["shape"])) for name, entry in entries.items()]
    except (ValueError, KeyError, TypeError, struct.error) as error:
        raise Misuse("RegistrationMismatch", f"{file} is no safetensors file: {error!r}") from error
