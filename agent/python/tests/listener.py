"""The agent's end of a socket, in the hands of a test."""

import array
import socket
import struct
import tempfile

import fleet


class Listener:
    """Accepts clients as an agent does; each wait has a limit."""

    def __init__(self, test):
        directory = tempfile.TemporaryDirectory()
        test.addCleanup(directory.cleanup)
        self.path = f"{directory.name}/agent.sock"
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        test.addCleanup(self.listener.close)
        self.listener.bind(self.path)
        self.listener.listen()
        self.listener.settimeout(fleet.PATIENCE)

    def accept(self):
        peer, _ = self.listener.accept()
        peer.settimeout(fleet.PATIENCE)
        return peer


def read_exactly(peer, length):
    data = b""
    while len(data) < length:
        part = peer.recv(length - len(data))
        if not part:
            raise AssertionError(f"the client ended after {len(data)} of {length} bytes")
        data += part
    return data


def read_frame(peer):
    (length,) = struct.unpack("<I", read_exactly(peer, 4))
    return read_exactly(peer, length).decode()


def send_frame(peer, text, fds=()):
    data = struct.pack("<I", len(text.encode())) + text.encode()
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sent = peer.sendmsg([data], rights)
    if sent < len(data):  # who has it all may have ended
        peer.sendall(data[sent:])
