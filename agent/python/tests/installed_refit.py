"""A refit of tests/local/tiny.yaml with what is installed beside this interpreter alone; test_wheel.py runs it.

Needs nothing that the wheel does not bring. Every element of a step is the step's number, which bf16 holds exactly.
"""

import os
import pathlib
import struct
import sys

import weightrefit  # before the checkout's own can be found

sys.path.append(str(pathlib.Path(__file__).parent))
os.environ["WEIGHTREFIT_BIN"] = os.path.dirname(sys.executable)
import fleet  # noqa: E402

TRAINING_RANKS, STEPS = 3, 2
SQUARES = [f"layers.0.{name}.weight" for name in "kqvo"]
ENGINE = {"embed.weight": (1024, 256), "layers.0.o.weight": (256, 128), "layers.0.qkv.weight": (384, 256), "norm.weight": (256,)}
PADDING = (0, (2 * 1024 - 2000) * 256)  # elements of each engine rank


def rows(extent, rank):
    """As `torch.chunk` cuts."""
    each = -(-extent // TRAINING_RANKS)
    return min(each, extent - each * rank)


def place(rank):
    tensors = [weightrefit.Tensor("embed.weight", "f32", (rows(2000, rank), 256)), weightrefit.Tensor("norm.weight", "f32", (rows(256, rank),))]
    return weightrefit.place(tensors + [weightrefit.Tensor(name, "f32", (rows(256, rank), 256)) for name in SQUARES])


class Callbacks:
    def pause(self, in_flight):
        pass

    def apply(self, staging):
        self.live = {name: bytes(content) for name, content in staging.items()}

    def commit(self, version, kv_cache, extras):
        return []

    def resume(self, version):
        pass


def main():
    assert "site-packages" in weightrefit.__file__, weightrefit.__file__
    of = fleet.Fleet(fleet.ROOT / "tests/local/tiny.yaml")
    try:
        placed = [place(rank) for rank in range(TRAINING_RANKS)]
        trainers = [weightrefit.Trainer(rank, "w", socket=of.socket_of(f"training/{rank}")) for rank in range(TRAINING_RANKS)]
        tensors = [weightrefit.Tensor(name, "bf16", shape) for name, shape in ENGINE.items()]
        seats = sorted(word for words in of.agents.values() for word in words if word.startswith("inference/"))
        callbacks = [Callbacks() for _ in seats]
        engines = [
            weightrefit.Engine(*seat.split("/")[1:3], rank, tensors, callbacks[rank], socket=of.socket_of(seat)) for rank, seat in enumerate(seats)
        ]
        joining = [lambda rank=rank: trainers[rank].register(placed[rank], fleet.PATIENCE) for rank in range(TRAINING_RANKS)]
        fleet.together(*joining, *(engine.register for engine in engines))
        with weightrefit.Refit(socket=of.socket_of("training/0")) as refit:
            for step in range(1, STEPS + 1):
                for rank, trainer in enumerate(trainers):
                    for part in placed[rank]:
                        part.buffer[:] = struct.pack("<f", step) * (part.tensor.nbytes // 4)
                    trainer.publish(step)
                report = refit.sync(step, timeout=fleet.PATIENCE)
                for trainer in trainers:
                    trainer.wait_released(fleet.PATIENCE)
                for rank, engine in enumerate(engines):
                    engine.wait_served(step, fleet.PATIENCE)
                    check(step, rank, callbacks[rank].live)
                print(step, report.outcome)
        for client in (*trainers, *engines):
            client.close()
    finally:
        of.close()


def check(step, rank, live):
    want, zeros = struct.pack("<f", step)[2:], 0
    for content in live.values():
        for at in range(0, len(content), 2):
            element = content[at : at + 2]
            zeros += element == b"\0\0"
            assert element in (want, b"\0\0"), (step, rank, element)
    assert zeros == PADDING[rank], (step, rank, zeros)


if __name__ == "__main__":
    main()
