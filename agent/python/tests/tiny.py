"""What the ranks of tests/local/tiny.yaml hold, worked out here and not by the planner; and clients that hold it."""

import numpy as np

import fleet
import weightrefit

SHAPES = {
    "embed.weight": (2000, 256),
    "layers.0.k.weight": (256, 256),
    "layers.0.o.weight": (256, 256),
    "layers.0.q.weight": (256, 256),
    "layers.0.v.weight": (256, 256),
    "norm.weight": (256,),
}
TRAINING_RANKS = 3
REPLICA_RANKS = 2


def full(step):
    """Every tensor of the model at a step, f32: random bits of finite numbers, the same on every rank."""
    numbers = np.random.default_rng(step)
    return {name: numbers.standard_normal(shape, dtype=np.float32) for name, shape in SHAPES.items()}


def training_part(tensor, rank, ranks=TRAINING_RANKS):
    """Rows of a rank, by the rule of `torch.chunk`."""
    rows = -(-len(tensor) // ranks)
    return tensor[rank * rows : (rank + 1) * rows]


def bf16(tensor):
    """Bits of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(tensor).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def inference_part(tensors, rank):
    """Local tensors of an engine rank, as bits of bf16."""
    half = lambda tensor, dim=0: np.split(tensor, REPLICA_RANKS, axis=dim)[rank]  # noqa: E731
    embed = np.zeros((2048, 256), np.float32)
    embed[:2000] = tensors["embed.weight"]
    q, k, v, o = (tensors[f"layers.0.{name}.weight"] for name in "qkvo")
    held = {
        "embed.weight": half(embed),
        "layers.0.o.weight": half(o, 1),
        "layers.0.qkv.weight": np.concatenate([half(q), half(k), half(v)]),
        "norm.weight": tensors["norm.weight"],
    }
    return {name: bf16(tensor) for name, tensor in held.items()}


class TrainerRank:
    """One training rank."""

    def __init__(self, of, rank, world="w1", **options):
        self.rank = rank
        parts = {name: training_part(np.empty(shape, np.float32), rank) for name, shape in SHAPES.items()}
        tensors = [weightrefit.Tensor(name, "f32", part.shape) for name, part in parts.items()]
        self.placed = weightrefit.place(tensors)
        socket = of.socket_of(f"training/{rank}")
        self.client = weightrefit.Trainer(rank, world, socket=socket, **options)

    def register(self):
        self.client.register(self.placed, timeout=fleet.PATIENCE)

    def publish(self, step, extras=None):
        tensors = full(step)
        for placed in self.placed:
            placed.buffer[:] = training_part(tensors[placed.tensor.name], self.rank).tobytes()
        self.client.publish(step, extras)

    def wait_released(self):
        return self.client.wait_released(fleet.PATIENCE)


class EngineRank:
    """One engine rank, and its callbacks."""

    def __init__(self, of, replica, rank, pieces=None, **options):
        pieces = pieces or {}
        self.live = {name: np.full(part.shape, 0x7FC0, np.uint16) for name, part in inference_part(full(0), rank).items()}
        tensors = [weightrefit.Tensor(name, "bf16", part.shape, pieces.get(name)) for name, part in self.live.items()]
        self.rank, self.calls, self.told, self.wrong = rank, [], [], {}
        socket = of.socket_of(f"inference/default/{replica}/{rank}")
        self.client = weightrefit.Engine("default", replica, rank, tensors, self, socket=socket, **options)

    def register(self):
        self.client.register(timeout=fleet.PATIENCE)

    def differing(self, step):
        """Elements that are not those of `step`, pads included."""
        want = inference_part(full(step), self.rank)
        return sum(int(np.count_nonzero(self.live[name] != want[name])) for name in want)

    def pause(self, in_flight):
        self.told.append(in_flight)
        self._called("pause")

    def apply(self, staging):
        self._called("apply")
        for name, content in staging.items():
            self.live[name][...] = np.frombuffer(content, np.uint16).reshape(self.live[name].shape)

    def commit(self, version, kv_cache, extras):
        self.told.append(kv_cache)
        self._called("commit")
        return ["prefix"]

    def resume(self, version):
        self._called("resume")

    def _called(self, name):
        self.calls.append(name)
        if name in self.wrong:
            raise self.wrong.pop(name)


def replica_names(of):
    """Replicas of the fleet, in order."""
    seats = [word for arguments in of.agents.values() for word in arguments if word.startswith("inference/")]
    return sorted({seat.split("/")[2] for seat in seats})
