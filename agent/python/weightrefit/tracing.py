"""Runs a loader on tensors without content and records what it copies. Needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from .pytorch import dtype_name
from .recording import Recorded, Unrecordable, View, piece, row_major
from .tensor import Tensor

_aten = torch.ops.aten

# Copies that a loader makes on the way: what they give holds the same elements.
_CLONES = (_aten.clone, _aten._to_copy, _aten.contiguous)


class Tracing(TorchDispatchMode):
    """While it is entered, what is copied from `source` tensors to `target` tensors is recorded, and nothing is copied.

    Attributes:
        recorded: by name of the target.
        used: names of sources that were copied somewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.recorded: dict[str, Recorded] = {}
        self.used: set[str] = set()
        # By the storage's address: what it is, and the tensor, which keeps the address taken.
        self._sources: dict[int, tuple[str, Sequence[int], torch.Tensor]] = {}
        self._targets: dict[int, tuple[str, torch.Tensor]] = {}
        # Copies: what they hold, as a view of a source.
        self._copies: dict[int, tuple[int, Sequence[int], View, torch.Tensor]] = {}

    def source(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor of the checkpoint, without content."""
        tensor = torch.empty(tuple(shape), dtype=dtype, device="meta")
        self._sources[_storage(tensor)] = (name, tuple(shape), tensor)
        return tensor

    def target(self, name: str, tensor: torch.Tensor) -> None:
        """A tensor of the engine, which the loader fills; its content stays as it is."""
        if not tensor.is_contiguous() or tensor.storage_offset():
            raise Unrecordable(f"`{name}` is not row-major in memory of its own")
        if (other := self._targets.setdefault(_storage(tensor), (name, tensor)))[0] != name:
            raise Unrecordable(f"`{name}` shares the memory of `{other[0]}`")
        described = Tensor(name, dtype_name(name, tensor), tuple(tensor.shape))
        self.recorded[name] = Recorded(described)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        packet = function.overloadpacket
        if packet is _aten.copy_ and self._is_target(args[0]):
            self._copy(args[0], args[1])
            return args[0]
        if packet in (_aten.fill_, _aten.zero_) and self._is_target(args[0]):
            self._fill(args[0], args[1] if len(args) > 1 else 0)
            return args[0]
        if packet is _aten._local_scalar_dense and (found := self._find(args[0])):
            raise Unrecordable(f"the loader reads the content of `{found[0]}`")
        if function._schema.is_mutable and isinstance(args[0], torch.Tensor) and (name := self._known(args[0])):
            raise Unrecordable(f"the loader changes `{name}` by `{packet}`, which is no copy of the checkpoint")
        result = function(*args, **(kwargs or {}))
        if packet in _CLONES and isinstance(result, torch.Tensor) and _storage(result) != _storage(args[0]):
            self._clone(args[0], result)
        return result

    def _is_target(self, tensor: Any) -> bool:
        return isinstance(tensor, torch.Tensor) and _storage(tensor) in self._targets

    def _known(self, tensor: torch.Tensor) -> str | None:
        """The target, or the source, whose elements a tensor shows."""
        if self._is_target(tensor):
            return self._targets[_storage(tensor)][0]
        found = self._find(tensor)
        return found and found[0]

    def _find(self, tensor: torch.Tensor) -> tuple[str, Sequence[int], list[tuple[Sequence[int], View]]] | None:
        """The source that a tensor shows, by way of which copies."""
        at, copies = _storage(tensor), []
        while (copy := self._copies.get(at)) is not None:
            at = copy[0]
            copies.append((copy[1], copy[2]))
        found = self._sources.get(at)
        return found and (found[0], found[1], copies)

    def _copy(self, local: torch.Tensor, source: torch.Tensor) -> None:
        name, whole = self._targets[_storage(local)]
        if local.numel() == 0:
            return
        shown = source.expand(local.shape) if source.shape != local.shape else source
        found = self._find(shown)
        if found is None:
            raise Unrecordable(f"`{name}` is given what the loader computes, which is no copy of the checkpoint")
        tensor, shape, copies = found
        made = piece(tensor, shape, _view(shown), tuple(whole.shape), _view(local), copies)
        if made is not None:
            self.used.add(tensor)
            self.recorded[name].pieces.append(made)

    def _fill(self, local: torch.Tensor, value: Any) -> None:
        name, _ = self._targets[_storage(local)]
        if value != 0 and local.numel():
            raise Unrecordable(f"the loader fills a part of `{name}` with {value}")
        self.recorded[name].zeroed += local.numel()

    def _clone(self, tensor: torch.Tensor, result: torch.Tensor) -> None:
        at = _storage(tensor)
        if at not in self._sources and at not in self._copies:
            return
        # The result's dims in the order in which they lie in its memory.
        order = sorted(range(result.dim()), key=lambda dim: (-result.stride(dim), dim))
        shape = [result.shape[dim] for dim in order]
        if tuple(result.stride(dim) for dim in order if result.shape[dim] > 1) != tuple(
            stride for stride, extent in zip(row_major(shape), shape) if extent > 1
        ):
            return  # it has gaps; a copy of it is refused as one of something computed
        view = _view(tensor.permute(order))
        self._copies[_storage(result)] = (at, shape, view, result)


def _view(tensor: torch.Tensor) -> View:
    return View(tuple(tensor.shape), tuple(tensor.stride()), tensor.storage_offset())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
