"""Tensors as the agent knows them: a name, a dtype, a shape."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .errors import Misuse

if TYPE_CHECKING:
    from .recording import Piece

# Bytes of one element, by the names that layouts and the agent socket use.
DTYPES = {
    "bool": 1,
    "u8": 1,
    "i8": 1,
    "i16": 2,
    "i32": 4,
    "i64": 8,
    "f16": 2,
    "bf16": 2,
    "f32": 4,
    "f64": 8,
    "f8e4m3": 1,
    "f8e5m2": 1,
}


@dataclass(frozen=True)
class Tensor:
    """One local tensor of a rank: row-major and contiguous.

    Attributes:
        name: the side's own name, as the layout has it.
        dtype: storage type, a key of `DTYPES` (`"bf16"`).
        shape: local extents in elements; a 0 among them is an empty shard.
        pieces: what of the checkpoint lies where in it, where that was recorded; `None` where the layout says it.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] | None = None

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise Misuse("DtypeMismatch", f"tensor `{self.name}` has dtype `{self.dtype}`, which is none of {known}")
        if any(extent < 0 for extent in self.shape):
            raise Misuse("RegistrationMismatch", f"tensor `{self.name}` has shape {list(self.shape)}")

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, without any padding."""
        return math.prod(self.shape) * DTYPES[self.dtype]
