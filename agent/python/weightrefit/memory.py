"""Memory that a client and its agent share: sealed memfds of a trainer, and staging of an agent."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from .device import DeviceMemory
from .errors import Misuse, ProtocolError
from .tensor import Group, GroupClass, Tensor
from .wire import Frame, field

# Where tensors begin in a memory: a cache line.
ALIGNMENT = 64

# The agent maps nothing whose size may change.
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Memory:
    """Shared memory of a training rank: this process writes it, its agent maps it read-only.

    The kernel frees it when this object, every view of `buffer`, and the agent's mapping are gone.

    Attributes:
        nbytes: size in bytes.
        fd: the sealed memfd.
        buffer: all of it, writable, as bytes.
    """

    def __init__(self, nbytes: int):
        if nbytes <= 0:
            raise Misuse("Unsupported", f"memory of {nbytes} bytes was asked for")
        self.nbytes = nbytes
        self.fd = os.memfd_create("weightrefit-trainer", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, nbytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
        self.buffer = memoryview(mmap.mmap(self.fd, nbytes))

    @property
    def frame(self) -> Frame:
        """As a registration lists it."""
        return {"bytes": self.nbytes}

    def __del__(self) -> None:
        if hasattr(self, "fd"):
            os.close(self.fd)


class _At(NamedTuple):
    tensor: Tensor
    memory: Memory | DeviceMemory
    offset: int


class Placed(_At):
    """A tensor and where it lies.

    Attributes:
        tensor: name, dtype and shape.
        memory: what it lies in.
        offset: its first byte there; any is allowed, `place` aligns to 64.
    """

    __slots__ = ()

    def __new__(cls, tensor: Tensor, memory: Memory | DeviceMemory, offset: int) -> Placed:
        end = offset + tensor.nbytes
        if offset < 0 or end > memory.nbytes:
            where = f"bytes {offset} to {end} of a memory of {memory.nbytes}"
            raise Misuse("RegistrationMismatch", f"tensor `{tensor.name}` would lie at {where}")
        return super().__new__(cls, tensor, memory, offset)

    @property
    def buffer(self) -> memoryview:
        """Its bytes, writable, row-major; an empty tensor has none. Of memory of the host only."""
        if isinstance(self.memory, DeviceMemory):
            raise Misuse("Unsupported", f"tensor `{self.tensor.name}` lies on {self.memory.device}, which has no buffer")
        return self.memory.buffer[self.offset : self.offset + self.tensor.nbytes]


def place(tensors: Iterable[Tensor]) -> list[Placed]:
    """Makes one memory for all `tensors`, in their order."""
    offsets, end = [], 0
    tensors = list(tensors)
    for tensor in tensors:
        offsets.append(end)
        end += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
    memory = Memory(max(end, ALIGNMENT))
    return [Placed(tensor, memory, offset) for tensor, offset in zip(tensors, offsets)]


class _Content(Mapping[str, memoryview]):
    """New content of tensors, by name."""

    _views: Mapping[str, memoryview]

    def __getitem__(self, name: str) -> memoryview:
        return self._views[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)


class StagedGroup(_Content):
    """New content of the tensors of one group, as in `Staging`.

    Attributes:
        name: of the group.
        kind: what is to do beside copying.
    """

    def __init__(self, group: Group, views: Mapping[str, memoryview]):
        self.name, self.kind, _ = group
        self._views = {name: views[name] for name in group.tensors}


class Staging(_Content):
    """New content of an engine rank's tensors, by name: read-only bytes, row-major, in the registered dtype.

    It is right only while `EngineCallbacks.apply` runs: copy out of it, keep nothing of it.
    """

    def __init__(self, frame: Frame, fds: list[int], tensors: Mapping[str, Tensor], groups: Sequence[Group] = ()):
        """Maps what a `staging` frame brought; its descriptors stay the caller's.

        Args:
            groups: as they were registered; without any, all tensors are one.

        Raises:
            ProtocolError: the frame does not describe these tensors in that memory.
        """
        self._views = _views(frame, fds, tensors)
        self._groups = groups or (Group("all", GroupClass.DIRECT, tuple(tensors)),)
        self._applied = 0
        self._heard: Callable[[int], None] = lambda group: None

    def groups(self) -> Iterator[StagedGroup]:
        """The groups in the order of their registration. Whoever asks for the next one has applied the last."""
        for number, group in enumerate(self._groups):
            self._applied = number
            yield StagedGroup(group, self._views)
            self._applied = number + 1
            self._heard(number)

    def begin(self, heard: Callable[[int], None]) -> None:
        """From here on new content is applied, from its first group; `heard` is called with each that was."""
        self._applied, self._heard = 0, heard

    @property
    def applying(self) -> str | None:
        """Name of the first group that is not applied; `None` after the last."""
        return self._groups[self._applied].name if self._applied < len(self._groups) else None


def _views(frame: Frame, fds: list[int], tensors: Mapping[str, Tensor]) -> dict[str, memoryview]:
    nbytes = field(frame, "bytes", int)
    buffer = _map(nbytes, fds)
    views = {}
    for entry in field(frame, "tensors", list):
        entry = entry if isinstance(entry, dict) else {}
        name, offset, length = field(entry, "name", str), field(entry, "offset", int), field(entry, "bytes", int)
        if name not in tensors or length != tensors[name].nbytes or not 0 <= offset <= nbytes - length:
            raise ProtocolError("RegistrationMismatch", f"staging of {nbytes} bytes has `{name}` at {offset}, {length} bytes")
        views[name] = buffer[offset : offset + length]
    missing = [name for name in tensors if name not in views]
    if missing:
        raise ProtocolError("RegistrationMismatch", f"staging lacks {len(missing)} tensors, the first is `{missing[0]}`")
    return views


def _map(nbytes: int, fds: list[int]) -> memoryview:
    if len(fds) != 1:
        raise ProtocolError("Unsupported", f"staging came with {len(fds)} descriptors")
    try:
        # Where the size could shrink, a read would end this process.
        seals = fcntl.fcntl(fds[0], fcntl.F_GET_SEALS)
        if not seals & fcntl.F_SEAL_SHRINK:
            raise ProtocolError("Unsupported", "staging is not sealed against shrinking")
        if nbytes == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(fds[0], nbytes, mmap.MAP_SHARED, mmap.PROT_READ))
    except (OSError, OverflowError, ValueError) as error:
        raise ProtocolError("Unsupported", f"staging of {nbytes} bytes cannot be mapped: {error}") from error
