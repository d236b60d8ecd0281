"""Frames of the agent socket, protocol 1: a little-endian u32 length and one JSON object; descriptors ride as
`SCM_RIGHTS` on the frame's first byte. docs/agent-socket.md has the frames."""

from __future__ import annotations

import array
import json
import os
import socket
import struct
import threading
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any, TypeVar

from .errors import ProtocolError

PROTOCOL = 1

# Longest JSON object.
FRAME_BYTES_MAX = 16 << 20

# Most descriptors on one frame.
FRAME_FDS_MAX = 64

# Longest extras, as JSON.
EXTRAS_BYTES_MAX = 64 << 10

# Bytes that are read at once: an announced length alone reserves nothing.
_CHUNK_BYTES = 1 << 20

_PREFIX = struct.Struct("<I")
_CONTROL_BYTES = socket.CMSG_SPACE(FRAME_FDS_MAX * array.array("i").itemsize)

Frame = dict[str, Any]

_E = TypeVar("_E", bound=Enum)


def _malformed(message: str) -> ProtocolError:
    remedy = "Run the agent and this package in the same version of weightrefit."
    return ProtocolError("Unsupported", message, remedy=remedy)


def encode(frame: Mapping[str, Any]) -> bytes:
    """A frame as bytes, length prefix included."""
    body = json.dumps(frame, ensure_ascii=False, separators=(",", ":")).encode()
    if len(body) > FRAME_BYTES_MAX:
        raise _malformed(f"frame of {len(body)} bytes is longer than the {FRAME_BYTES_MAX} allowed")
    return _PREFIX.pack(len(body)) + body


def decode(body: bytes | bytearray) -> Frame:
    """The object of a frame, which has a `type`."""
    try:
        frame = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _malformed(f"frame of {len(body)} bytes is no JSON: {error}") from error
    if not isinstance(frame, dict) or not isinstance(frame.get("type"), str):
        raise _malformed(f"frame of {len(body)} bytes is no object with a `type`")
    return frame


def field(frame: Mapping[str, Any], name: str, kind: type) -> Any:
    """A field that the frame must have. A bool is no int."""
    value = frame.get(name)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _malformed(f"frame `{frame.get('type')}` has no {kind.__name__} `{name}`")
    return value


def choice(frame: Mapping[str, Any], name: str, kind: type[_E]) -> _E:
    """A field that the frame must have, as one of an enum."""
    value = field(frame, name, str)
    try:
        return kind(value)
    except ValueError as error:
        raise _malformed(f"frame `{frame.get('type')}` has {name} `{value}`") from error


class Connection:
    """One connection to an agent. One thread receives; any thread sends."""

    def __init__(self, path: str):
        """Connects.

        Raises:
            OSError: nobody listens at `path`.
        """
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._sending = threading.Lock()
        try:
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise

    def send(self, frame: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Sends a frame whole, with descriptors on its first byte.

        Raises:
            OSError: the agent is gone.
        """
        data = encode(frame)
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        with self._sending:
            sent = self._socket.sendmsg([data], rights)
            if sent < len(data):
                self._socket.sendall(memoryview(data)[sent:])

    def receive(self) -> tuple[Frame, list[int]] | None:
        """The next frame and its descriptors, which are the caller's; `None` at the end of the stream.

        Raises:
            OSError: the connection broke.
            ProtocolError: what came is no frame.
        """
        fds: list[int] = []
        try:
            prefix = self._first(fds)
            if prefix is None:
                return None
            prefix += self._exactly(_PREFIX.size - len(prefix))
            (length,) = _PREFIX.unpack(prefix)
            if length > FRAME_BYTES_MAX:
                raise _malformed(f"frame of {length} bytes is longer than the {FRAME_BYTES_MAX} allowed")
            return decode(self._exactly(length)), fds
        except BaseException:
            for fd in fds:
                os.close(fd)
            raise

    def end(self) -> None:
        """Wakes the receiving thread, which sees the end of the stream."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the other end was faster

    def close(self) -> None:
        """Closes the socket: only by the thread that receives."""
        self._socket.close()

    def _first(self, fds: list[int]) -> bytes | None:
        data, control, flags, _ = self._socket.recvmsg(_PREFIX.size, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
        for level, kind, payload in control:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                passed = array.array("i")
                passed.frombytes(payload[: len(payload) - len(payload) % passed.itemsize])
                fds.extend(passed)
        if flags & socket.MSG_CTRUNC or len(fds) > FRAME_FDS_MAX:
            raise _malformed(f"frame carries more than {FRAME_FDS_MAX} descriptors")
        return data or None

    def _exactly(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = self._socket.recv(min(length - len(data), _CHUNK_BYTES))
            if not part:
                raise ConnectionResetError("stream ended inside a frame")
            data += part
        return bytes(data)
