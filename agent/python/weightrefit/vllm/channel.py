"""Between an engine's workers and the controller beside it: frames as on the agent socket, over a Unix socket of the
controller's. A worker asks and waits; the controller answers.

It reaches the workers of one machine. An engine over several machines needs an agent and a controller on each, which
this version does not have.
"""

from __future__ import annotations

import logging
from typing import Any

from ..codes import REMEDIES
from ..errors import ProtocolError, WeightrefitError
from ..wire import Connection, Frame

logger = logging.getLogger("weightrefit")


class RankChannel:
    """A worker's end. The client's thread asks; any thread tells."""

    def __init__(self, path: str, rank: int):
        self._connection = Connection(path)
        self._connection.send({"type": "rank", "rank": rank})

    def ask(self, kind: str, **more: Any) -> Frame:
        """Says something and waits for the answer.

        Raises:
            WeightrefitError: the controller could not do it, or is gone.
        """
        try:
            self._connection.send({"type": kind, **more})
            received = self._connection.receive()
        except OSError as error:
            raise ProtocolError("EngineRefused", f"the controller is gone: {error}") from error
        if received is None:
            raise ProtocolError("EngineRefused", "the controller is gone")
        frame, _ = received
        if frame["type"] == "failed":
            raise WeightrefitError("EngineRefused", str(frame.get("message")))
        return frame

    def tell(self, kind: str, **more: Any) -> None:
        """Says something that has no answer."""
        try:
            self._connection.send({"type": kind, **more})
        except OSError as error:
            logger.warning("the controller does not hear of `%s`: %s", kind, error)

    def refuse(self, error: Exception) -> None:
        """Says why this rank takes no part."""
        code = getattr(error, "code", "RegistrationMismatch")
        message = getattr(error, "message", f"{type(error).__name__}: {error}")
        self.tell("refused", code=code, message=message, remedy=getattr(error, "remedy", REMEDIES.get(code)))

    def close(self) -> None:
        """Ends it; who waits for an answer gets none."""
        self._connection.end()
