"""Client of the weightrefit agent of this pod.

Three roles, one object each:

* `Trainer`: one training rank; registers its tensors, publishes steps, learns when its memory is its own again.
* `Engine`: one inference rank; pauses, takes new weights out of staging memory, serves.
* `Refit`: the loop's author; `report = await refit(step)`.

All of them find the agent by `WEIGHTREFIT_SOCKET`. Where that is unset they do nothing and say so once in the log, so
the same program runs without weightrefit. Every exception is a `WeightrefitError` with `code`, `rank` and `remedy`.

The package needs the standard library only; `weightrefit.pytorch` imports torch, and nothing else does.
"""

from .device import DeviceMemory
from .driver import Refit
from .engine import Engine, EngineCallbacks
from .errors import (
    AgentUnreachable,
    Closed,
    DeadlineExceeded,
    ExecutorFailed,
    Misuse,
    ProtocolError,
    PublishRefused,
    RefitFailed,
    Refused,
    WeightrefitError,
)
from .events import (
    Event,
    Events,
    MembershipChanged,
    Missed,
    ReplicaFound,
    ReplicaLost,
    ReplicaReach,
    RoundEnded,
    RoundOpened,
    VersionAccepted,
)
from .memory import Memory, Placed, StagedGroup, Staging, place
from .record import EngineState, InFlight, KvCache, Version
from .report import RankStatus, ReplicaReport, Report, Status
from .tensor import Group, GroupClass, Tensor
from .trainer import Outcome, Trainer

__all__ = [
    "AgentUnreachable",
    "Closed",
    "DeadlineExceeded",
    "DeviceMemory",
    "Engine",
    "EngineCallbacks",
    "EngineState",
    "Event",
    "Events",
    "ExecutorFailed",
    "Group",
    "GroupClass",
    "InFlight",
    "KvCache",
    "MembershipChanged",
    "Memory",
    "Missed",
    "Misuse",
    "Outcome",
    "Placed",
    "ProtocolError",
    "PublishRefused",
    "RankStatus",
    "Refit",
    "RefitFailed",
    "Refused",
    "ReplicaFound",
    "ReplicaLost",
    "ReplicaReach",
    "ReplicaReport",
    "Report",
    "RoundEnded",
    "RoundOpened",
    "StagedGroup",
    "Staging",
    "Status",
    "Tensor",
    "Trainer",
    "Version",
    "VersionAccepted",
    "WeightrefitError",
    "place",
]
