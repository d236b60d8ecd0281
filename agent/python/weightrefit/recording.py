"""What a loader copies, as pieces: which elements of which checkpoint tensor lie where in which tensor of an engine.

An engine's own loader runs once on tensors without content. Slices, views and transposes of such a tensor are what
they are of any other: an offset and strides. So a copy between two views says by itself, in numbers, which elements
go where, and nothing has to be known of the loader. Nothing here needs torch; `weightrefit.tracing` does.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field as default
from itertools import product
from typing import Any

from .errors import Misuse
from .tensor import Tensor

# A run: first position in the local tensor's dim, first in the checkpoint tensor's, number.
Run = tuple[int, int, int]


@dataclass(frozen=True)
class View:
    """Elements of a row-major tensor.

    Attributes:
        shape: extents.
        strides: per dim the distance of neighbours, in elements of the tensor.
        offset: of the first element.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @classmethod
    def whole(cls, shape: Sequence[int]) -> View:
        """All elements, in order."""
        return cls(tuple(shape), row_major(shape), 0)


@dataclass(frozen=True)
class Piece:
    """A region of a checkpoint tensor in a local tensor, as docs/layouts.md has it.

    Attributes:
        tensor: name in the checkpoint.
        lead: index on the local tensor's leading dim, where it has one more than the checkpoint's.
        runs: per dim of the checkpoint tensor.
        permute: local dim `i` (after `lead`) is dim `permute[i]` of the checkpoint tensor; `None` is the identity.
    """

    tensor: str
    lead: int | None
    runs: tuple[tuple[Run, ...], ...]
    permute: tuple[int, ...] | None = None

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(sum(run[2] for run in runs) for runs in self.runs)

    def json(self) -> dict[str, Any]:
        """As on the wire."""
        frame: dict[str, Any] = {"tensor": self.tensor}
        if self.lead is not None:
            frame["lead"] = self.lead
        frame["dims"] = self.runs
        if self.permute is not None:
            frame["permute"] = self.permute
        return frame


class Unrecordable(Misuse):
    """A loader does what no pieces can say; a layout document has to."""

    def __init__(self, message: str):
        remedy = "Write the layout of this engine as a document (docs/layouts.md), or report the model."
        super().__init__("LayoutRejected", message, remedy=remedy)


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def piece(
    tensor: str,
    source_shape: Sequence[int],
    source: View,
    local_shape: Sequence[int],
    local: View,
    copies: Sequence[tuple[Sequence[int], View]] = (),
) -> Piece | None:
    """The piece that copying `source` to `local` makes; `None` where nothing is copied.

    Args:
        tensor: name in the checkpoint.
        source_shape, local_shape: of the whole tensors.
        source, local: which elements, of equal shape.
        copies: where `source` is a view not of the checkpoint's tensor but of a copy: the copy's shape and what it
            holds, in its order; the copy nearest to `source` first.

    Raises:
        Unrecordable: the copy repeats elements, or mixes dims so that it is no product of runs.
    """
    if 0 in source.shape:
        return None
    if source.shape != local.shape:
        raise Unrecordable(f"`{tensor}`: {list(source.shape)} is spread over {list(local.shape)}")
    dims = [(extent, (a, b)) for extent, a, b in zip(source.shape, local.strides, source.strides)]
    offset = source.offset
    for shape, held in copies:
        dims = _refined(dims, [None, (shape, offset)])
        offset = held.offset + sum(at * stride for at, stride in zip(_digits(offset, shape), held.strides))
        moved = [(extent, a, _axis(b, shape)) for extent, (a, b) in dims]
        dims = [(extent, (a, step * held.strides[axis])) for extent, a, (axis, step) in moved]
    dims = _refined(dims, [(local_shape, local.offset), (source_shape, offset)])
    local_starts, source_starts = _digits(local.offset, local_shape), _digits(offset, source_shape)
    # Local dim -> (checkpoint dim, [(extent, step in the local dim, step in the checkpoint's)]).
    found: dict[int, tuple[int, list[tuple[int, int, int]]]] = {}
    for extent, (to, origin) in dims:
        (a, step), (b, source_step) = _axis(to, local_shape), _axis(origin, source_shape)
        if found.setdefault(a, (b, []))[0] != b:
            raise Unrecordable(f"`{tensor}`: one dim of {list(local_shape)} takes two of {list(source_shape)}")
        found[a][1].append((extent, step, source_step))
    left_local = [a for a in range(len(local_shape)) if a not in found]
    taken = {b for b, _ in found.values()}
    left_source = [b for b in range(len(source_shape)) if b not in taken]
    lead = None
    if len(local_shape) == len(source_shape) + 1 and left_local[:1] == [0]:
        lead = local_starts[left_local.pop(0)]
    if len(left_local) != len(left_source) or len(taken) != len(found):
        raise Unrecordable(f"`{tensor}` {list(source_shape)} goes to a part of {list(local_shape)} that has other dims")
    found.update({a: (b, []) for a, b in zip(left_local, left_source)})
    order = [found[a][0] for a in sorted(found)]
    runs: list[tuple[Run, ...]] = [()] * len(source_shape)
    for a, (b, steps) in found.items():
        runs[b] = _runs(local_starts[a], source_starts[b], steps)
    permute = None if order == sorted(order) else tuple(order)
    return Piece(tensor, lead, tuple(runs), permute)


def merged(pieces: Iterable[Piece]) -> list[Piece]:
    """Pieces that differ in the runs of one dim only, as one: what a loader copied expert by expert, say."""
    out: list[Piece] = []
    for one in pieces:
        last = out[-1] if out else None
        joined = last and _joined(last, one)
        if joined:
            out[-1] = joined
        else:
            out.append(one)
    return out


@dataclass
class Recorded:
    """What the loader did to one local tensor."""

    tensor: Tensor
    pieces: list[Piece] = default(default_factory=list)
    zeroed: int = 0

    @property
    def missing(self) -> int:
        """Elements that were given nothing."""
        return math.prod(self.tensor.shape) - sum(piece.elements for piece in self.pieces) - self.zeroed

    def registered(self) -> Tensor:
        """The tensor with its pieces."""
        tensor = self.tensor
        return Tensor(tensor.name, tensor.dtype, tensor.shape, tuple(merged(self.pieces)))


def complete(recorded: Iterable[Recorded], explained: Mapping[str, str], unused: Iterable[str]) -> list[Tensor]:
    """The tensors to register: every tensor of the live engine gets all its elements, or its absence is explained.

    Args:
        recorded: all local tensors.
        explained: names of tensors that need nothing, with the reason.
        unused: tensors of the checkpoint that the loader copied nowhere, for the message.

    Raises:
        Misuse: `RegistrationMismatch`, with the names of the first five that lack something.
    """
    tensors, lacking = [], []
    for each in recorded:
        name = each.tensor.name
        if name in explained:
            continue
        if each.missing > 0:
            total = math.prod(each.tensor.shape)
            lacking.append(f"`{name}` is given nothing" if each.missing == total else f"`{name}` lacks {each.missing} of {total} elements")
        tensors.append(each.registered())
    if lacking:
        message = f"the checkpoint does not fill {len(lacking)} tensors of the engine: {'; '.join(lacking[:5])}"
        rest = sorted(unused)
        if rest:
            message += f". It has {len(rest)} tensors that the engine does not take, as `{rest[0]}`"
        raise Misuse("RegistrationMismatch", message, remedy="Start the engine on the checkpoint of the model that is trained.")
    return tensors


def _digits(offset: int, shape: Sequence[int]) -> list[int]:
    """Position of an element, per dim."""
    out = []
    for stride, extent in zip(row_major(shape), shape):
        out.append(offset // stride % extent if stride and extent else 0)
    return out


def _axis(stride: int, shape: Sequence[int]) -> tuple[int, int]:
    """The dim of a row-major tensor that a stride moves along, and by how many positions."""
    for dim, (own, extent) in enumerate(zip(row_major(shape), shape)):
        if extent > 1 and own <= stride < own * extent and stride % own == 0:
            return dim, stride // own
    raise Unrecordable(f"a stride of {stride} moves along no dim of {list(shape)}")


def _refined(
    dims: list[tuple[int, tuple[int, int]]], roots: Sequence[tuple[Sequence[int], int] | None]
) -> list[tuple[int, tuple[int, int]]]:
    """The same elements with every dim inside one dim of each root, so that flattened dims come apart."""
    todo, out = list(reversed(dims)), []
    while todo:
        extent, strides = todo.pop()
        if extent == 1:
            continue
        if 0 in strides:
            raise Unrecordable("an element is copied to several places")
        inner = extent
        for stride, root in zip(strides, roots):
            if root is None:
                continue
            shape, offset = root
            dim, step = _axis(stride, shape)
            start = _digits(offset, shape)[dim]
            if start + step * (extent - 1) >= shape[dim]:
                inner = min(inner, shape[dim] // step if start < step else 1)
        if inner == extent:
            out.append((extent, strides))
        elif inner < 2 or extent % inner:
            raise Unrecordable(f"{extent} elements in a row are not whole rows of {shape}")
        else:
            todo.append((inner, strides))
            todo.append((extent // inner, (strides[0] * inner, strides[1] * inner)))
    return out


def _runs(local: int, source: int, steps: list[tuple[int, int, int]]) -> tuple[Run, ...]:
    """Positions as runs, sorted by the local one."""
    length = 1
    for at, (extent, step, source_step) in enumerate(steps):
        if step == source_step == 1:
            length = extent
            steps = steps[:at] + steps[at + 1 :]
            break
    starts = []
    for index in product(*(range(extent) for extent, _, _ in steps)):
        moved = [(i * step, i * source_step) for i, (_, step, source_step) in zip(index, steps)]
        starts.append((local + sum(to for to, _ in moved), source + sum(origin for _, origin in moved)))
    runs: list[Run] = []
    for to, origin in sorted(starts):
        if runs and (to, origin) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + length)
        else:
            runs.append((to, origin, length))
    return tuple(runs)


def _joined(a: Piece, b: Piece) -> Piece | None:
    if (a.tensor, a.lead, a.permute) != (b.tensor, b.lead, b.permute):
        return None
    differ = [dim for dim, (one, other) in enumerate(zip(a.runs, b.runs)) if one != other]
    if len(differ) != 1:
        return None
    (dim,) = differ
    last, first = a.runs[dim][-1], b.runs[dim][0]
    if first[0] < last[0] + last[2]:
        return None  # overlapping or out of order: told apart by whoever looks at both
    if (first[0], first[1]) == (last[0] + last[2], last[1] + last[2]):
        together = (*a.runs[dim][:-1], (last[0], last[1], last[2] + first[2]), *b.runs[dim][1:])
    else:
        together = (*a.runs[dim], *b.runs[dim])
    return Piece(a.tensor, a.lead, (*a.runs[:dim], together, *a.runs[dim + 1 :]), a.permute)
