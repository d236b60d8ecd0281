"""What the client itself costs, with a real agent: `make bench-client`.

Prints one line for each figure and writes target/bench/client.json, in the form of the other benches. Nothing is
asserted: the bars are goals, and a busy machine misses them.
"""

import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "tests"))
import fleet
import yaml

import weightrefit

TENSORS = 1_000
MANY = 100_000
ROUNDS = 20
REGISTRATIONS = 5
IMPORTS = 16


def named(count):
    return [weightrefit.Tensor(f"model.layers.{n // 400}.mlp.experts.{n % 400}.gate_proj.weight", "f32", (64,)) for n in range(count)]


def resource(file, tensors):
    whole = {
        "layout": "v1",
        "sizes": {"rank": 1},
        "world": 1,
        "grids": {"all": ["rank"]},
        "axes": {"none": []},
        "stages": {"axis": "none", "layers": [[0, 1]]},
        "rules": [{"hf": "(?P<n>.*)", "to": "{n}"}],
    }
    layout = {"type": "Inline", "inline": whole}
    tensors = [{"name": tensor.name, "shape": tensor.shape, "dtype": tensor.dtype} for tensor in tensors]
    ranks = {"type": "StatefulSet", "ranksPerPod": 1}
    spec = {
        "model": {"type": "TensorTable", "tensorTable": {"configMapKeyRef": {"name": "table", "key": "t"}}},
        "training": {"worldSize": 1, "ranks": ranks, "layout": layout},
        "inference": {"pools": [{"name": "default", "ranksPerReplica": 1, "minReplicas": 1, "ranks": ranks, "layout": layout}]},
    }
    refit = {"apiVersion": "weightrefit.dev/v1alpha1", "kind": "WeightRefit", "metadata": {"name": "bench", "namespace": "bench"}, "spec": spec}
    table = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "table", "namespace": "bench"}, "data": {"t": json.dumps({"tensors": tensors})}}
    file.write_text(yaml.safe_dump_all([refit, table]))


class Engine(weightrefit.Engine):
    """Measures what a commit costs; its callbacks do nothing."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.commits = []

    def _commit(self, *arguments):
        begin = time.perf_counter()
        super()._commit(*arguments)
        self.commits.append(time.perf_counter() - begin)


class Callbacks:
    def pause(self, in_flight):
        pass

    def apply(self, staging):
        for _ in staging.groups():
            pass

    def commit(self, version, kv_cache, extras):
        return []

    def resume(self, version):
        pass


@contextlib.contextmanager
def registered(tensors):
    """A trainer of one rank with its placed tensors, and what makes an engine of one rank; both are members."""
    with tempfile.TemporaryDirectory() as directory:
        file = pathlib.Path(directory, "refit.yaml")
        resource(file, tensors)
        of = fleet.Fleet(file)
        seat = next(word for words in of.agents.values() for word in words if word.startswith("inference/"))
        groups = [weightrefit.Group(tensor.name, weightrefit.GroupClass.DIRECT, (tensor.name,)) for tensor in tensors]

        def engine():
            return Engine("default", seat.split("/")[2], 0, tensors, Callbacks(), groups=groups, socket=of.socket_of(seat))

        try:
            with weightrefit.Trainer(0, "bench", socket=of.socket_of("training/0")) as trainer, engine() as rank:
                placed = weightrefit.place(tensors)
                fleet.together(lambda: trainer.register(placed), rank.register)
                yield trainer, placed, rank, engine
        finally:
            of.close()


def rounds():
    """Seconds of `publish`, and of a commit of as many groups: the median of all rounds."""
    with registered(named(TENSORS)) as (trainer, placed, rank, _):
        publishes = []
        for step in range(1, ROUNDS + 1):
            placed[0].buffer[:4] = step.to_bytes(4, "little")
            begin = time.perf_counter()
            trainer.publish(step)
            publishes.append(time.perf_counter() - begin)
            trainer.wait_released()
            rank.wait_served(step, fleet.PATIENCE)
        return sorted(publishes)[ROUNDS // 2], sorted(rank.commits)[ROUNDS // 2]


def registering():
    """Seconds to register many tensors with an agent that has a membership: the median."""
    with registered(named(MANY)) as (_, _, rank, engine):
        took = []
        for _ in range(REGISTRATIONS):
            rank.close()
            rank = engine()
            begin = time.perf_counter()
            rank.register()
            took.append(time.perf_counter() - begin)
        rank.close()
        return statistics.median(took)


def importing():
    """Seconds that `import weightrefit` adds to a Python start, compiled as pip leaves it: the median."""
    program = "import time; t = time.perf_counter(); import weightrefit; print(time.perf_counter() - t)"
    with tempfile.TemporaryDirectory() as compiled:
        env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        where = {"cwd": fleet.ROOT / "agent/python", "env": env | {"PYTHONPYCACHEPREFIX": compiled}}
        outputs = [subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, **where).stdout for _ in range(IMPORTS)]
    return statistics.median(map(float, outputs[1:]))  # the first has compiled


def main():
    publish, commit = rounds()
    rows = [
        (f"publish of {TENSORS} tensors", publish, 0.005),
        (f"commit of {TENSORS} groups, beside copying", commit, 0.005),
        (f"registration of {MANY} tensors", registering(), 1.0),
        ("import weightrefit", importing(), 0.05),
    ]
    out = [{"name": name, "value": 1e3 * value, "unit": "ms", "peer": None, "bar": 1e3 * bar, "pass": value < bar} for name, value, bar in rows]
    for row in out:
        print(f"{row['name']:48} {row['value']:9.3f} ms   goal {row['bar']:7.1f} ms")
    file = fleet.ROOT / "target/bench/client.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
