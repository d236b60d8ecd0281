"""What a PyTorch module holds on this rank: DTensor, FSDP2, HSDP and tensor-parallel parameters, without gathering.

A training rank::

    shards = Shards(model)                      # once, after sharding and loading
    with Trainer(rank, world_token()) as trainer:
        trainer.register(shards.placed)
        for step in range(steps):
            train(model)
            trainer.wait_released() if step else None
            shards.snapshot()                   # copies what does not lie in shared memory already
            trainer.publish(step)

With snapshots the memory that is lent is the copy, so the next optimizer step need not wait for the release; only the
next `snapshot` does. With `adopt=True` parameters live in the shared memory, nothing is copied, and every write to them
has to wait.

Only elements travel: FSDP2 pads uneven shards in memory, and the padding is never registered. Values keep their dtype;
the agent casts fp32 to what the destination stores, on the way out.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from .errors import Misuse
from .memory import ALIGNMENT, Memory, Placed, place
from .tensor import Tensor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement

_DTYPES = {
    torch.bool: "bool",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float8_e4m3fn: "f8e4m3",
    torch.float8_e5m2: "f8e5m2",
}
TORCH_DTYPES = {name: dtype for dtype, name in _DTYPES.items()}

# What wrappers put into the names of a module's parameters; checkpoints and layouts do not have it.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def world_token() -> str:
    """A token that all ranks of this start share: rank 0 of the default process group draws it, the others get it."""
    token = torch.zeros(16, dtype=torch.uint8)
    if torch.distributed.get_rank() == 0:
        token = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.uint8)
    if torch.distributed.get_backend() == "nccl":
        token = token.cuda()
    torch.distributed.broadcast(token, src=0)
    return bytes(token.cpu().tolist()).hex()


@dataclass(frozen=True)
class Shard:
    """One tensor as this rank holds it.

    Attributes:
        tensor: local name, dtype and shape.
        shape: extents of the whole tensor, in elements.
        start: the local box's first element in the whole tensor, for each dim.
    """

    tensor: Tensor
    shape: tuple[int, ...]
    start: tuple[int, ...]


class Shards:
    """All tensors of a module on this rank, in shared memory.

    Attributes:
        shards: parameters, then the buffers that a checkpoint has, each once.
        aliases: further names of tied parameters -> the name under which the tensor is registered.
        placed: for `Trainer.register`.
    """

    def __init__(self, module: nn.Module, *, adopt: bool = False, rename: Callable[[str], str] = lambda name: name):
        """Describes the module's tensors and makes room for them. No communication, no full tensor.

        Args:
            module: sharded, loaded, on any device.
            adopt: move CPU storages into the shared memory, in place, with all their aliases. What cannot be moved,
                or is moved elsewhere later, is copied by `snapshot`.
            rename: from the module's names to the layout's.

        Raises:
            Misuse: a tensor cannot be described; its name is in the message.
        """
        self._module = module
        self._held, self.aliases = _held(module, rename)
        reshard(module)
        local = [_local(held) for held in self._held]
        self.shards = [_describe(held, tensor) for held, tensor in zip(self._held, local)]
        if adopt:
            self.placed = _adopt(self.shards, local)
        else:
            self.placed = place(shard.tensor for shard in self.shards)
        self._views = [writable(placed) for placed in self.placed]

    @torch.no_grad()
    def snapshot(self) -> int:
        """Copies every tensor that does not lie in the shared memory already; returns the bytes copied.

        Call it while the registered memory is the trainer's, and on the thread that trains.

        Raises:
            Misuse: a parameter was replaced since, or changed its shape.
        """
        reshard(self._module)
        copied = 0
        for held, shard, view in zip(self._held, self.shards, self._views):
            local = _local(held)
            if tuple(local.shape) != shard.tensor.shape or _DTYPES.get(local.dtype) != shard.tensor.dtype:
                raise Misuse("PointerMoved", f"`{shard.tensor.name}` has become {local.dtype} {list(local.shape)}")
            if view is not None and not _same_memory(local, view):
                view.copy_(local)
                copied += shard.tensor.nbytes
        return copied


def copy_staging(staging: Mapping[str, memoryview], live: Mapping[str, torch.Tensor]) -> None:
    """Copies new content from an engine's staging to its live tensors, by name.

    Args:
        staging: what `EngineCallbacks.apply` was given.
        live: all registered tensors, with their registered dtypes and shapes.
    """
    with torch.no_grad():
        for name, content in staging.items():
            tensor = live[name]
            if content.nbytes:
                tensor.copy_(read_only(content, tensor.dtype).view(tensor.shape))


def describe(live: Mapping[str, torch.Tensor]) -> list[Tensor]:
    """An engine rank's live tensors, for `Engine`."""
    return [Tensor(name, dtype_name(name, tensor), tuple(tensor.shape)) for name, tensor in live.items()]


def tied(module: nn.Module) -> dict[str, str]:
    """Further names of the module's tied parameters -> the name that comes first."""
    return _held(module, lambda name: name)[1]


def reshard(module: nn.Module) -> None:
    """Brings FSDP2 modules back to their shards, as before a checkpoint; the root keeps its gathered parameters after
    a forward pass alone."""
    for part in module.modules():
        free = getattr(part, "reshard", None)
        if free is not None and hasattr(part, "unshard"):
            free()


@dataclass(frozen=True)
class _Held:
    """Where a module keeps a tensor; `tensor` is what was there first."""

    name: str
    owner: nn.Module
    key: str
    tensor: torch.Tensor

    def present(self) -> torch.Tensor | None:
        kept = self.owner._parameters if self.key in self.owner._parameters else self.owner._buffers
        return kept.get(self.key)


def _held(module: nn.Module, rename: Callable[[str], str]) -> tuple[list[_Held], dict[str, str]]:
    reshard(module)
    first: dict[int, str] = {}
    held, aliases, names = [], {}, set()
    for raw, owner, key, tensor in _tensors(module):
        for wrapper in _WRAPPERS:
            raw = raw.replace(wrapper, "")
        name = rename(raw)
        if name in names:
            raise Misuse("RegistrationMismatch", f"two tensors of the module are named `{name}`")
        names.add(name)
        if id(tensor) in first:
            aliases[name] = first[id(tensor)]
            continue
        first[id(tensor)] = name
        held.append(_Held(name, owner, key, tensor))
    return held, aliases


def _tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, torch.Tensor]]:
    """Parameters, then persistent buffers, each under all its names."""
    parts = list(module.named_modules(remove_duplicate=False))
    for path, part in parts:
        for key, tensor in part._parameters.items():
            if tensor is not None:
                yield f"{path}.{key}" if path else key, part, key, tensor
    for path, part in parts:
        for key, tensor in part._buffers.items():
            if tensor is not None and key not in part._non_persistent_buffers_set:
                yield f"{path}.{key}" if path else key, part, key, tensor


@torch.no_grad()
def _local(held: _Held) -> torch.Tensor:
    """This rank's elements, without padding."""
    if held.present() is not held.tensor:
        raise Misuse("PointerMoved", f"`{held.name}` was replaced by another tensor after it was registered")
    tensor = held.tensor
    return (tensor.to_local() if _is_dtensor(tensor) else tensor).detach()


def _describe(held: _Held, local: torch.Tensor) -> Shard:
    tensor = held.tensor
    described = Tensor(held.name, dtype_name(held.name, local), tuple(local.shape))
    if not _is_dtensor(tensor):
        return Shard(described, described.shape, (0,) * local.dim())
    start, shape = box(tensor.shape, tensor.device_mesh, tensor.placements)
    if shape != described.shape:
        message = f"`{held.name}` holds {list(described.shape)} of {list(tensor.shape)}, its placements say {list(shape)}"
        raise Misuse("LayoutRejected", message)
    return Shard(described, tuple(tensor.shape), start)


def box(shape: Sequence[int], mesh: DeviceMesh, placements: Sequence[Placement]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """First element and extents of this rank's part of a DTensor, by the rule of `torch.chunk`.

    FSDP2 over tensor parallelism shards a dim a second time: it lists its mesh dim first and marks it as strided, and
    what it cuts is what tensor parallelism has left.

    Raises:
        Misuse: a placement has no local part of its own (`Partial`).
    """
    coordinate = mesh.get_coordinate()
    start, extent = [0] * len(shape), list(shape)
    if coordinate is None:
        return tuple(start), tuple(0 for _ in extent)
    cuts = [at for at, placement in enumerate(placements) if not placement.is_replicate()]
    strided = [at for at in cuts if hasattr(placements[at], "split_factor")]
    for at in [at for at in cuts if at not in strided] + strided:
        dim = getattr(placements[at], "dim", None)
        if dim is None:
            raise Misuse("LayoutRejected", f"placement {placements[at]} has no part that belongs to this rank")
        width = -(-extent[dim] // mesh.size(at))
        before = min(coordinate[at] * width, extent[dim])
        start[dim] += before
        extent[dim] = min(width, extent[dim] - before)
    return tuple(start), tuple(extent)


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "placements") and hasattr(tensor, "device_mesh")


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """The dtype of a tensor as layouts and the agent socket name it."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise Misuse("DtypeMismatch", f"`{name}` is stored as {tensor.dtype}, which cannot be sent")
    return dtype


def _adopt(shards: list[Shard], local: list[torch.Tensor]) -> list[Placed]:
    """One memory: whole storages that move into it, then room for tensors whose storage does not."""
    storages: dict[int, int] = {}
    offsets, end = [], 0
    for shard, tensor in zip(shards, local):
        if _can_move(tensor):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in storages:
                storages[storage.data_ptr()] = end
                end += _aligned(storage.nbytes())
            offsets.append(storages[storage.data_ptr()] + tensor.storage_offset() * tensor.element_size())
        else:
            offsets.append(end)
            end += _aligned(shard.tensor.nbytes)
    memory = Memory(max(end, ALIGNMENT))
    for tensor in local:
        # A storage that has moved is at another address.
        to = storages.pop(tensor.untyped_storage().data_ptr(), None) if _can_move(tensor) else None
        if to is not None:
            _move(tensor.untyped_storage(), memory, to)
    return [Placed(shard.tensor, memory, offset) for shard, offset in zip(shards, offsets)]


def _can_move(tensor: torch.Tensor) -> bool:
    storage = tensor.untyped_storage()
    can = hasattr(storage, "_swap_data_ptr_")  # torch 2.13 and later
    return can and tensor.device.type == "cpu" and tensor.numel() > 0 and tensor.is_contiguous()


def _move(storage: torch.UntypedStorage, memory: Memory, offset: int) -> None:
    """The storage's bytes move; every tensor on it follows."""
    room = torch.frombuffer(memory.buffer, dtype=torch.uint8, count=storage.nbytes(), offset=offset).untyped_storage()
    room.copy_(storage)
    storage._swap_data_ptr_(room)


def _aligned(nbytes: int) -> int:
    return math.ceil(nbytes / ALIGNMENT) * ALIGNMENT


def writable(placed: Placed) -> torch.Tensor | None:
    """The tensor's place in shared memory, writable; `None` for an empty one."""
    tensor = placed.tensor
    if tensor.nbytes == 0:
        return None
    count, dtype = math.prod(tensor.shape), TORCH_DTYPES[tensor.dtype]
    flat = torch.frombuffer(placed.memory.buffer, dtype=dtype, count=count, offset=placed.offset)
    return flat.view(tensor.shape)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.device == b.device and a.data_ptr() == b.data_ptr() and a.stride() == b.stride()


def read_only(content: memoryview, dtype: torch.dtype) -> torch.Tensor:
    """Staged bytes as a flat tensor, without copying them."""
    with warnings.catch_warnings():
        # Nothing writes to it.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(content, dtype=dtype)
