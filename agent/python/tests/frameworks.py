"""NeMo RL and verl without their heavy parts: what stands in for their trainers and engines holds the tensors of
tests/local/tiny.yaml. Ray is the real one where it is installed."""

import asyncio
import contextlib
import importlib
import importlib.util
import pathlib
import sys
import tempfile
import types
import unittest.mock

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet
import yaml
from tiny import REPLICA_RANKS, TRAINING_RANKS, EngineRank, full, replica_names, training_part

import weightrefit
from weightrefit.integrations import engines
from weightrefit.integrations.ranks import TrainingRank

HERE = pathlib.Path(__file__).parent
HAS_RAY = importlib.util.find_spec("ray") is not None
if not HAS_RAY:
    import ray_stand_in

    sys.modules["ray"] = ray_stand_in
import ray  # noqa: E402

# Where verl is installed, if it is. Importing it whole takes all that it depends on.
_VERL = importlib.util.find_spec("verl")
VERL = pathlib.Path(_VERL.origin).parent if _VERL else None


def start_ray():
    """Once a process: actors find the tests' modules."""
    if HAS_RAY and not ray.is_initialized():
        paths = f"{HERE}:{HERE.parent}"
        ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": paths}})


def actor(test, cls, *arguments):
    """An actor that ends with the test."""
    started = ray.remote(cls).options(num_cpus=0).remote(*arguments)
    test.addCleanup(ray.kill, started)
    return started


class Node:
    """Whose agent listens at `socket`: what an actor knows of a fleet."""

    def __init__(self, socket):
        self.socket = socket

    def socket_of(self, seat):
        return self.socket


class TinyShards:
    """Snapshots of whatever step its owner is at."""

    def __init__(self, rank, owner):
        self.rank, self.owner = rank, owner
        parts = {name: training_part(tensor, rank) for name, tensor in full(0).items()}
        self.placed = weightrefit.place(weightrefit.Tensor(name, "f32", part.shape) for name, part in parts.items())

    def snapshot(self):
        tensors = full(self.owner.trained)
        for placed in self.placed:
            placed.buffer[:] = training_part(tensors[placed.tensor.name], self.rank).tobytes()
        return sum(placed.tensor.nbytes for placed in self.placed)


class TrainerActor:
    """A training rank; `trained` is the step whose weights it holds."""

    def __init__(self, rank, socket):
        self.rank, self.socket, self.trained = rank, socket, 0

    async def train(self, step):
        self.trained = step


def tiny_rank(worker):
    """What a policy worker publishes."""
    return TrainingRank(worker.rank, "w1", TinyShards(worker.rank, worker), socket=worker.socket)


class TinyEngine:
    """Has of vLLM's engine the task that hands out its tokens, on the event loop where it was made."""

    def __init__(self, socket):
        self.socket = socket
        self.output_handler = asyncio.get_running_loop().create_task(asyncio.Event().wait())


class TinyController:
    """In the place of `weightrefit.vllm.Controller`, whose own tests run vLLM."""

    def __init__(self, engine, *, pool, replica):
        self.settings, self.enabled = (pool, replica), engine.socket is not None
        self.engine, self.ranks = engine, [EngineRank(Node(engine.socket), replica, rank) for rank in range(REPLICA_RANKS)]

    async def start(self, timeout):
        assert self.engine.output_handler.get_loop() is asyncio.get_running_loop()
        await asyncio.to_thread(fleet.together, *(rank.register for rank in self.ranks))

    async def close(self):
        for rank in self.ranks:
            rank.client.close()


class EngineActor:
    """One engine of either framework; NeMo RL keeps it as `llm`, verl as `engine`."""

    def __init__(self, socket):
        engines.Controller = TinyController
        self.llm = self.engine = TinyEngine(socket)
        self.global_steps = None

    async def set_global_steps(self, global_steps):
        self.global_steps = global_steps

    async def told(self):
        """Settings of the controller, and the framework's step."""
        return self.weightrefit.controller.settings, self.global_steps

    async def differing(self, step):
        """Elements that are not those of `step`; all of them where something else is served."""
        ranks = self.weightrefit.controller.ranks
        await asyncio.to_thread(lambda: [rank.client.wait_served(step, fleet.PATIENCE) for rank in ranks])
        return sum(rank.differing(step) for rank in ranks)

    async def break_next(self, callback):
        self.weightrefit.controller.ranks[-1].wrong[callback] = RuntimeError("broken by the test")


class FrameworkTest(fleet.FleetTest):
    """A fleet as docs/python.md has it on Ray, one node for the trainer and one for each engine, and a framework's actors."""

    REPLICAS = 2

    def setUp(self):
        file = tempfile.NamedTemporaryFile("w", suffix=".yaml")
        self.addCleanup(file.close)
        refit, *others = yaml.safe_load_all((fleet.ROOT / "tests/local/tiny.yaml").read_text())
        refit["spec"]["training"]["ranks"] = {"type": "Registered", "ranksPerPod": TRAINING_RANKS}
        refit["spec"]["inference"]["pools"][0] |= {"ranks": {"type": "Registered", "ranksPerPod": REPLICA_RANKS}, "minReplicas": 1}
        yaml.safe_dump_all([refit, *others], file)
        file.flush()
        self.FILES = (file.name,)
        super().setUp()
        start_ray()
        seats = [f"inference/default/{name}/0" for name in replica_names(self.fleet)]
        self.engines = [actor(self, EngineActor, self.fleet.socket_of(seat)) for seat in seats]

    def trainers(self, cls, *more):
        return [actor(self, cls, rank, self.fleet.socket_of(f"training/{rank}"), *more) for rank in range(TRAINING_RANKS)]

    def assert_served(self, step):
        self.assertEqual(ray.get([engine.differing.remote(step) for engine in self.engines]), [0] * self.REPLICAS)


class Timer:
    """As NeMo RL's: what was timed."""

    def __init__(self):
        self.labels = []

    def time(self, label):
        self.labels.append(label)
        return contextlib.nullcontext()


def nemo_rl(signatures="nemo_rl_later"):
    """The adapter, made on what a version of NeMo RL asks of it."""
    if getattr(sys.modules.get("nemo_rl.weight_sync.interfaces"), "__name__", None) == signatures:
        return importlib.import_module("weightrefit.integrations.nemo_rl")
    spec = importlib.util.spec_from_file_location(signatures, HERE / "signatures" / f"{signatures}.py")
    interfaces = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(interfaces)
    for name in ("nemo_rl", "nemo_rl.weight_sync"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["nemo_rl.weight_sync.interfaces"] = interfaces
    sys.modules.pop("weightrefit.integrations.nemo_rl", None)
    return importlib.import_module("weightrefit.integrations.nemo_rl")


def verl():
    """The adapter, made on verl's own checkpoint engines; what those import beside stands in."""
    if "verl" not in sys.modules:
        none = type("Unused", (), {})
        keep = lambda **_: lambda function: function  # noqa: E731
        for name, content in {
            "verl": {"__path__": [str(VERL)]},
            "verl.utils": {"__path__": [str(VERL / "utils")]},
            "verl.workers": {"__path__": [str(VERL / "workers")]},
            "verl.single_controller": {},
            "verl.single_controller.base": {"Worker": object},
            "verl.single_controller.base.decorator": {"Dispatch": types.SimpleNamespace(ONE_TO_ALL=1, DP_COMPUTE=2), "register": keep},
            "verl.single_controller.ray": {"RayClassWithInitArgs": none, "RayWorkerGroup": none},
            "verl.utils.distributed": {"initialize_global_process_group_ray": None},
            "verl.workers.config": dict.fromkeys(("CheckpointEngineConfig", "HFModelConfig", "RolloutConfig"), none),
            "verl.workers.rollout": dict.fromkeys(("BaseRollout", "RolloutReplica", "get_rollout_class"), none),
            "verl.workers.rollout.utils": {"ensure_async_iterator": None},
        }.items():
            sys.modules[name] = stand_in = types.ModuleType(name)
            vars(stand_in).update(content)
        torch = types.ModuleType("torch")
        vars(torch).update(dict.fromkeys(("Tensor", "Size", "dtype"), none))
        # Only while verl says what types it takes: other tests must not find it.
        with unittest.mock.patch.dict(sys.modules, {} if importlib.util.find_spec("torch") else {"torch": torch}):
            kept = dict(sys.modules)
            importlib.import_module("verl.checkpoint_engine.base")
            made = {name: sys.modules[name] for name in sys.modules.keys() - kept.keys()}
        sys.modules.update(made)
    return importlib.import_module("weightrefit.integrations.verl")
