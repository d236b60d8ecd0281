"""Tensors as the agent knows them: a name, a dtype, a shape."""

from __future__ import annotations

import math
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

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


class _Described(NamedTuple):
    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...] | None


class Tensor(_Described):
    """One local tensor of a rank: row-major and contiguous.

    Attributes:
        name: the side's own name, as the layout has it.
        dtype: storage type, a key of `DTYPES` (`"bf16"`).
        shape: local extents in elements; a 0 among them is an empty shard.
        pieces: what of the checkpoint lies where in it, where that was recorded; `None` where the layout says it.
    """

    __slots__ = ()

    def __new__(cls, name: str, dtype: str, shape: tuple[int, ...], pieces: tuple[Piece, ...] | None = None) -> Tensor:
        if dtype not in DTYPES:
            raise Misuse("DtypeMismatch", f"tensor `{name}` has dtype `{dtype}`, which is none of {', '.join(DTYPES)}")
        if any(extent < 0 for extent in shape):
            raise Misuse("RegistrationMismatch", f"tensor `{name}` has shape {list(shape)}")
        return super().__new__(cls, name, dtype, shape, pieces)

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, without any padding."""
        return math.prod(self.shape) * DTYPES[self.dtype]


class GroupClass(Enum):
    """What an engine has to do beside copying, for new content of a group to be what it serves."""

    DIRECT = "Direct"
    """Nothing: what it serves from are these tensors."""
    DERIVED = "Derived"
    """It serves from these tensors, and from what it computes anew in place whenever they change."""
    APPLY = "Apply"
    """It serves another form of them: packed, quantised, transposed."""


class Group(NamedTuple):
    """Tensors that an engine rank processes together, such as those of one module.

    Attributes:
        name: unique on the rank; logs and messages have it.
        kind: what is to do beside copying.
        tensors: names of the tensors; each of the rank's is in one group.
    """

    name: str
    kind: GroupClass
    tensors: tuple[str, ...]
