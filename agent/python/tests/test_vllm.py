"""Real FSDP2 in float32, real agents, real vLLM in bfloat16: what a refitted engine says is what one says that was
started on the checkpoint."""

import contextlib
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet  # noqa: E402

import qwen  # noqa: E402
from fleet import together  # noqa: E402

import weightrefit  # noqa: E402

# Importing it takes half a minute.
HAS_VLLM = importlib.util.find_spec("vllm") is not None
if HAS_VLLM:
    import torch

needs_vllm = unittest.skipUnless(HAS_VLLM, "vLLM is not installed: `make test-engines` fetches it and runs this")

HERE = pathlib.Path(__file__).parent
PROMPTS = [[(7 * i + 3 * j) % 490 + 5 for j in range(70 + 9 * i)] for i in range(4)]

# Seconds: a process imports vLLM, and starts an engine of two workers, on a machine that does other things too.
STARTING = 600.0

# Two engines on one checkpoint differ on a CPU by about an ulp of a bfloat16 logit, without any refit; greedy tokens do
# not, and one engine repeats itself exactly.
LOGPROB_NOISE = 0.1


def installed(directory):
    """The package as pip installs it, with the entry point that vLLM looks for."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--target", f"{directory}/site", HERE.parent], check=True, stdin=subprocess.DEVNULL)
    return f"{directory}/site"


class Process:
    """A child that answers lines."""

    def __init__(self, name, command, directory, **env):
        self.name, self.log = name, pathlib.Path(directory, f"{name}.log")
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=dict(os.environ, **env), start_new_session=True
            )

    def tell(self, line):
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def answer(self):
        while line := self.process.stdout.readline():
            with contextlib.suppress(ValueError):
                return json.loads(line)
        raise AssertionError(f"{self.name} ended:\n{self.log.read_text(errors='replace')[-8000:]}")

    def ask(self, line):
        self.tell(line)
        return self.answer()

    def do(self, what, **more):
        return self.ask(json.dumps({"do": what, **more}))

    def kill(self):
        """With all its children."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, 9)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()

    def end(self):
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            self.process.wait(fleet.PATIENCE)
        except subprocess.TimeoutExpired:
            pass
        self.kill()


class Bed:
    """A training world, agents, and engines."""

    def __init__(self, layout, replicas=1, tensor_parallel=2, world=3, config="CONFIG", commit=None, trained=1):
        self.world, self.config, self.trained = world, config, trained
        self.directory = tempfile.mkdtemp(prefix="weightrefit-")
        self.tensor_parallel = tensor_parallel
        self.site = installed(self.directory)
        self._processes = []
        file = qwen.resource(f"{self.directory}/refit.yaml", world, tensor_parallel, layout, getattr(qwen, config), commit, trained)
        self.fleet = fleet.Fleet(file, replicas=replicas)
        # The engines start on weights that no version has.
        self.first = f"{self.directory}/first"
        changes = getattr(qwen, config)
        tensors = qwen.model(seed=1, **changes).state_dict()
        qwen.save(self.first, {name: tensor.bfloat16() for name, tensor in tensors.items()}, **changes)
        self.replicas = sorted({seat.split("/")[2] for words in self.fleet.agents.values() for seat in words if seat.startswith("inference/")})

    def train(self):
        file = f"{self.directory}/group"
        ranks = []
        for rank in range(self.world):
            command = [sys.executable, str(HERE / "qwen_rank.py"), str(rank), str(self.world), file]
            command += [self.fleet.socket_of(f"training/{rank}"), self.config, str(self.trained)]
            ranks.append(self._start(f"trainer-{rank}", command))
        self.ranks = ranks

    def trainers(self, line):
        for rank in self.ranks:
            rank.tell(line)
        return [rank.answer() for rank in self.ranks]

    def checkpoint(self, name):
        return f"{self.directory}/group.{name}"

    def engine(self, name, model=None, **settings):
        settings = {"model": model or self.first, "tp": self.tensor_parallel, **settings}
        command = [sys.executable, str(HERE / "vllm_engine.py"), json.dumps(settings)]
        return self._start(name, command, PYTHONPATH=self.site)

    def replica(self, name, **settings):
        """An engine of the fleet; its second answer comes when it is registered."""
        agent = self.fleet.socket_of(f"inference/default/{name}/0")
        return self.engine(f"engine-{name}", agent=agent, replica=name, **settings)

    def fresh(self, name, prompts=PROMPTS, tokens=24):
        """What an engine says that was started on a checkpoint."""
        engine = self.engine(f"fresh-{name}", self.checkpoint(name))
        try:
            engine.answer(), engine.answer()
            return engine.do("generate", prompts=prompts, tokens=tokens), engine.do("checksums")
        finally:
            engine.end()

    def refit(self, step, **options):
        with weightrefit.Refit(socket=self.fleet.socket_of("training/0")) as refit:
            return refit.sync(step, timeout=STARTING, **options)

    def _start(self, name, command, **env):
        process = Process(name, command, self.directory, **env)
        self._processes.append(process)
        return process

    def close(self, show):
        for process in self._processes:
            process.kill()
        if show:
            print(self.fleet.logs(), file=sys.stderr)
            for process in self._processes:
                print(f"--- {process.name}\n{process.log.read_text(errors='replace')[-6000:]}", file=sys.stderr)
        self.fleet.close()
        shutil.rmtree(self.directory)


class BedTest(unittest.TestCase):
    def bed(self, layout, **sizes):
        bed = Bed(layout, **sizes)
        self.addCleanup(lambda: bed.close(show=fleet.has_failed(self)))
        return bed

    def assert_same_words(self, got, want):
        self.assertEqual([tokens for tokens, _ in got], [tokens for tokens, _ in want])
        for (_, one), (_, other) in zip(got, want):
            for a, b in zip(one, other):
                # The fifth and the sixth likeliest may change places.
                for token in a.keys() & b.keys():
                    self.assertAlmostEqual(a[token], b[token], delta=LOGPROB_NOISE)


@needs_vllm
class Recorded(unittest.TestCase):
    """What a model's own loader says, without an agent."""

    def recorder(self, tensors, dtype="bfloat16", **changes):
        self.dtype = dtype
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.model = f"{directory.name}/model"
        return self.process(self.save(self.model, tensors, **changes))

    def save(self, model, tensors, **changes):
        qwen.save(model, {name: tensor.to(getattr(torch, self.dtype)) for name, tensor in tensors.items()}, **changes | {"torch_dtype": self.dtype})
        return model

    def process(self, model):
        command = [sys.executable, str(HERE / "vllm_recorder.py"), json.dumps({"model": model, "dtype": self.dtype})]
        process = Process("recorder", command, pathlib.Path(model).parent)
        self.addCleanup(process.kill)
        self.assertEqual(process.answer(), "ready")
        return process

    def assert_recorded(self, recorder, preset, config):
        """Every parameter is there, and all of it lies where the shipped layout says."""
        told = recorder.do("record")
        self.assertFalse(told["moved"], "the model is as before")
        names = {tensor["name"] for tensor in told["tensors"]}
        self.assertEqual(sorted(names | set(told["explained"]) & set(told["parameters"])), told["parameters"])
        file = qwen.resource(f"{self.model}.yaml", 1, 1, qwen.preset(1, preset), config=config)
        command = [fleet.binary("weightrefit"), "layout", "pieces", "-f", file, "--side", "inference", "-o", "json"]
        (want,) = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["ranks"]
        pieces = [{"local": tensor["name"], **piece} for tensor in told["tensors"] for piece in tensor["pieces"]]
        key = lambda piece: (piece["local"], piece.get("lead", 0), piece["tensor"])  # noqa: E731
        self.assertEqual(sorted(pieces, key=key), sorted(want["pieces"], key=key))
        described = {tensor["name"]: (tensor["dtype"], tensor["shape"]) for tensor in told["tensors"]}
        self.assertEqual(described, {tensor["name"]: (tensor["dtype"], tensor["shape"]) for tensor in want["tensors"]})
        return told

    def assert_classes(self, told):
        """Norms are served as they are copied. Which of the others vLLM packs depends on the processor."""
        kinds = told["groups"]
        norms = {name for name in kinds if name.endswith("norm")}
        self.assertEqual({name for name, kind in kinds.items() if kind == "Direct"}, norms)
        self.assertLessEqual(set(kinds.values()), {"Direct", "Derived", "Apply"})
        self.assertEqual(list(kinds)[0], "model.embed_tokens", "in the order of the model")
        return set(kinds.values())

    def assert_applied(self, recorder, second, **changes):
        """The second checkpoint by what was recorded, and back."""
        prompts = PROMPTS[:2]
        before = recorder.do("generate", prompts=prompts)
        other = self.save(f"{self.model}-2", second, **changes)
        self.assertFalse(recorder.do("apply", directory=other)["moved"], "addresses stay")
        after = recorder.do("generate", prompts=prompts)
        self.assertNotEqual(after, before)
        self.assertEqual(after, self.process(other).do("generate", prompts=prompts))
        recorder.do("apply", directory=self.model)
        self.assertEqual(recorder.do("generate", prompts=prompts), before)

    def test_a_dense_model_is_what_the_preset_says_and_a_tensor_that_is_missing_or_renamed_is_named(self):
        first, second = (qwen.model(seed).state_dict() for seed in (1, 2))
        recorder = self.recorder(first)
        told = self.assert_recorded(recorder, "vllm/qwen-dense", qwen.CONFIG)
        self.assert_classes(told)
        self.assertEqual({name.rpartition(".")[2] for name in told["explained"]}, {"cos_sin_cache", "_k_scale", "_v_scale", "_q_scale", "_prob_scale"})
        for changes, name in [
            ({"without": ["model.norm.weight"]}, "model.norm.weight"),
            ({"without": ["model.layers.1.self_attn.k_proj.weight"]}, "model.layers.1.self_attn.qkv_proj.weight"),
            ({"renamed": {"model.norm.weight": "model.norms.weight"}}, "norms"),
        ]:
            refused = recorder.do("record", **changes)
            self.assertIn(name, refused["message"])
            self.assertFalse(refused["moved"])
        self.assert_recorded(recorder, "vllm/qwen-dense", qwen.CONFIG)
        self.assert_applied(recorder, second)

    def test_experts_are_what_the_preset_says(self):
        first, second = (qwen.experts(seed) for seed in (1, 2))
        recorder = self.recorder(first, **qwen.EXPERTS)
        self.assert_classes(self.assert_recorded(recorder, "vllm/qwen3-moe", qwen.EXPERTS))
        self.assert_applied(recorder, second, **qwen.EXPERTS)

    def test_weights_that_the_engine_packs_for_its_kernels_are_packed_again(self):
        first, second = (qwen.model(seed).state_dict() for seed in (1, 2))
        recorder = self.recorder(first, dtype="float32")
        self.assertIn("Apply", self.assert_classes(recorder.do("record")))
        self.assertIn([0], [shape for _, shape in recorder.do("pointers").values()], "live weights have another form")
        self.assert_applied(recorder, second)

    def test_a_tied_head_is_staged_once_and_applied_twice(self):
        tied = {"tie_word_embeddings": True}
        first, second = ({n: t for n, t in qwen.model(seed, **tied).state_dict().items() if n != "lm_head.weight"} for seed in (1, 2))
        recorder = self.recorder(first, **tied)
        told = recorder.do("record")
        self.assertEqual(told["explained"]["lm_head.weight"], "it is `model.embed_tokens.weight`")
        self.assert_applied(recorder, second, **tied)


@needs_vllm
class Refitted(BedTest):
    def trained(self, bed, step):
        bed.trainers("train")
        bed.trainers(f"save {step}")

    def refitted(self, bed, step):
        """Trains a step and refits it."""
        self.trained(bed, step)
        return self.published(bed, step)

    def published(self, bed, step):
        """Refits what was trained."""
        self.assertEqual(bed.trainers(f"publish {step}"), ["Read"] * bed.world)
        report = bed.refit(step)
        self.assertEqual((report.outcome, report.left_out), ("Committed", ()))
        return report

    def started(self, bed, *engines):
        for engine in engines:
            self.assertEqual(engine.answer(), "loaded")
        told = [engine.answer() for engine in engines]
        self.assertEqual([rank.answer() for rank in bed.ranks], ["ready"] * bed.world)
        return told

    def serving(self, **sizes):
        """A bed, and an engine of one rank that serves step 1."""
        bed = self.bed({"type": "Registered"}, tensor_parallel=1, **sizes)
        bed.train()
        engine = bed.replica(bed.replicas[0])
        self.started(bed, engine)
        self.refitted(bed, 1)
        return bed, engine

    def begun(self, engine, prompt, tokens):
        """A request named `running`, that has come some way."""
        engine.do("stream", name="running", prompt=prompt, tokens=tokens)
        fleet.wait_for("words", lambda: len(engine.do("so_far", name="running")) > 20)

    def three_versions_and_back(self, layout, **sizes):
        bed = self.bed(layout, **sizes)
        bed.train()
        engine = bed.replica(bed.replicas[0])
        self.started(bed, engine)
        seen = {}
        for step in (1, 2, 3):
            report = self.refitted(bed, step)
            print(f"step {step}: {dict(report.phase_milliseconds)} ms, {report.bytes_received} bytes", file=sys.stderr)
            seen[step] = engine.do("generate", prompts=PROMPTS), engine.do("checksums")
            self.assertEqual(engine.do("version"), f"0.{step}")
        bed.trainers("load 1")
        self.assertEqual(bed.trainers("publish 4"), ["Read"] * bed.world)
        self.assertEqual(bed.refit(4).outcome, "Committed")
        back = engine.do("generate", prompts=PROMPTS), engine.do("checksums")
        self.assertEqual(back, seen[1], "one engine repeats itself exactly")
        engine.end()
        for step in (1, 2, 3):
            words, sums = bed.fresh(step)
            self.assertEqual(seen[step][1], sums, "checksums of every parameter")
            self.assert_same_words(seen[step][0], words)
        self.assertEqual(len({json.dumps(words) for words, _ in seen.values()}), 3, "versions differ")

    def test_a_refitted_engine_says_what_a_fresh_one_says_for_three_versions_and_back_to_the_first(self):
        """Without any layout of the engine's: what its ranks record is what is planned."""
        self.three_versions_and_back({"type": "Registered"})

    def test_experts_that_the_trainer_holds_fused_arrive_in_those_of_the_engine(self):
        self.three_versions_and_back({"type": "Registered"}, world=4, config="EXPERTS")

    def test_shards_of_fsdp2_over_tensor_parallelism_arrive(self):
        self.three_versions_and_back({"type": "Registered"}, world=4, trained=2)

    def test_what_an_engine_records_is_what_the_shipped_layout_says(self):
        """The agent compares the two."""
        bed = self.bed(qwen.preset(2))
        bed.train()
        engine = bed.replica(bed.replicas[0])
        self.started(bed, engine)
        self.refitted(bed, 1)
        words = engine.do("generate", prompts=PROMPTS)
        engine.end()
        self.assert_same_words(words, bed.fresh(1)[0])

    def test_requests_in_flight_end_with_the_new_weights_and_a_failed_version_is_never_served(self):
        bed = self.bed({"type": "Registered"})
        bed.train()
        broken = pathlib.Path(bed.directory, "broken")
        engine = bed.replica(bed.replicas[0], broken=str(broken))
        self.started(bed, engine)
        self.refitted(bed, 1)
        prompt, tokens = PROMPTS[0], 300
        ((old, _),) = engine.do("generate", prompts=[prompt], tokens=tokens)
        self.begun(engine, prompt, tokens)
        self.refitted(bed, 2)
        reason, kept = engine.do("finished", name="running")
        self.assertEqual((reason, len(kept)), ("length", tokens))
        same = next((at for at, (a, b) in enumerate(zip(kept, old)) if a != b), tokens)
        self.assertTrue(20 < same < tokens, f"{same} words of the old weights, then others")
        ((tail, _),) = engine.do("generate", prompts=[prompt + kept[:same]], tokens=tokens - same)
        self.assertEqual(kept[same:], tail, "what follows is what the new weights say of all before it")
        # Ranks that disagree publish nothing, and the engine serves on.
        before = engine.do("generate", prompts=PROMPTS)
        for rank, step in zip(bed.ranks, (8, 9, 9)):
            rank.tell(f"refused {step}")
        self.assertNotIn("Read", [rank.answer() for rank in bed.ranks])
        self.assertEqual(engine.do("generate", prompts=PROMPTS), before)
        self.assertEqual(engine.do("version"), "0.2")
        # A worker that fails half way: the engine says nothing until it was given a whole version.
        broken.touch()
        bed.trainers("train")
        bed.trainers("publish 10")
        with self.assertRaises(weightrefit.RefitFailed):
            bed.refit(10)
        engine.do("stream", name="waits", prompt=prompt, tokens=5)
        broken.unlink()
        self.refitted(bed, 11)
        _, words = engine.do("finished", name="waits")
        ((want, _),) = engine.do("generate", prompts=[prompt], tokens=5)
        self.assertEqual(words, want)
        engine.end()
        self.assert_same_words([(want, [])], [(bed.fresh(11, [prompt], 5)[0][0][0], [])])

    def test_requests_in_flight_end_with_the_old_weights_under_drain(self):
        bed, engine = self.serving(commit={"inFlight": "Drain"})
        ((old, _),) = engine.do("generate", prompts=[PROMPTS[0]], tokens=200)
        self.trained(bed, 2)
        self.begun(engine, PROMPTS[0], 200)
        self.published(bed, 2)
        self.assertEqual(engine.do("finished", name="running"), ["length", old])
        ((new, _),) = engine.do("generate", prompts=[PROMPTS[0]], tokens=200)
        self.assertNotEqual(new, old)

    def test_requests_in_flight_end_at_once_under_abort_and_old_keys_and_values_are_used_on_under_keep(self):
        bed, engine = self.serving(commit={"inFlight": "Abort", "kvCache": "Keep"})
        seen, unseen = PROMPTS[0], PROMPTS[3]
        ((old, _),) = engine.do("generate", prompts=[seen], tokens=400)
        self.trained(bed, 2)
        self.begun(engine, seen, 400)
        self.published(bed, 2)
        reason, words = engine.do("finished", name="running")
        self.assertEqual((reason, words), ("abort", old[: len(words)]))
        self.assertTrue(20 < len(words) < 400, len(words))
        mixed, clean = engine.do("generate", prompts=[seen, unseen])
        sums = engine.do("checksums")
        engine.end()
        (want, other), fresh_sums = bed.fresh(2, [seen, unseen])
        self.assertEqual(sums, fresh_sums)
        self.assert_same_words([clean], [other])
        with self.assertRaises(AssertionError, msg="what the old weights made of this prompt is used on"):
            self.assert_same_words([mixed], [want])

    def test_later_requests_find_no_keys_and_values_of_old_weights_under_salt_by_version(self):
        bed, engine = self.serving(commit={"kvCache": "SaltByVersion"})
        prompt = PROMPTS[0]
        ((old, _),) = engine.do("generate", prompts=[prompt], tokens=400)
        self.trained(bed, 2)
        self.begun(engine, prompt, 400)
        self.published(bed, 2)
        reason, kept = engine.do("finished", name="running")
        same = next((at for at, (a, b) in enumerate(zip(kept, old)) if a != b), 400)
        self.assertEqual((reason, len(kept)), ("length", 400))
        self.assertTrue(20 < same < 400, f"{same} words of the old weights, then others")
        ((tail, _),) = engine.do("generate", prompts=[prompt + kept[:same]], tokens=400 - same)
        self.assertNotEqual(kept[same:], tail, "it went on with what the old weights had made of its words")
        words = engine.do("generate", prompts=PROMPTS)
        engine.end()
        self.assert_same_words(words, bed.fresh(2)[0])

    def test_a_replica_that_is_killed_in_a_round_and_started_again_serves_what_the_other_serves(self):
        bed = self.bed({"type": "Registered"}, tensor_parallel=1, replicas=2)
        bed.train()
        engines = [bed.replica(name) for name in bed.replicas]
        self.started(bed, *engines)
        self.refitted(bed, 1)
        bed.trainers("train")
        bed.trainers("save 2")
        for rank in bed.ranks:
            rank.tell("publish 2")
        engines[1].kill()
        self.assertEqual([rank.answer() for rank in bed.ranks], ["Read"] * 3)
        self.assertEqual(bed.refit(2, wait="quorum:1").outcome, "Committed")
        words = engines[0].do("generate", prompts=PROMPTS)
        again = bed.replica(bed.replicas[1])
        self.assertEqual(again.answer(), "loaded")
        again.answer()
        # It says nothing before it was given a version.
        again.do("stream", name="waits", prompt=PROMPTS[0], tokens=24)
        self.assertEqual(engines[0].do("generate", prompts=PROMPTS), words)
        self.refitted(bed, 3)
        (want, _), *_ = engines[0].do("generate", prompts=PROMPTS)
        self.assertEqual(again.do("finished", name="waits"), ["length", want])
        self.assertEqual((again.do("version"), engines[0].do("version")), ("0.3", "0.3"))

    def test_a_float32_checkpoint_that_the_engine_holds_in_bfloat16_is_refused_unless_that_is_meant(self):
        bed = self.bed({"type": "Registered"}, tensor_parallel=1)
        single = f"{bed.directory}/single"
        qwen.save(single, qwen.model(seed=1).state_dict(), torch_dtype="float32")
        for cast, want in ((False, "DtypeMismatch"), (True, None)):
            engine = bed.replica(bed.replicas[0], model=single, dtype="auto", cast=cast)
            self.assertEqual(engine.answer(), "loaded")
            if want is None:
                bed.train()
                self.assertEqual([rank.answer() for rank in bed.ranks], ["ready"] * 3)
            told = engine.answer()
            self.assertEqual(told.get("refused", {}).get("code"), want)
            if want:
                self.assertIn("in float32 and the engine holds it in bfloat16", told["refused"]["message"])
            engine.end()


TRAINER = """
import os, sys, torch
sys.path[:0] = {path!r}
import fleet
MODEL, steps = {model!r}, 2
torch.set_num_threads(1)
torch.distributed.init_process_group("gloo", init_method="file://" + {group!r}, rank={rank}, world_size=2)
def train(step, model):
    for parameter in model.parameters():
        parameter.data.mul_(1 + step / 10)
"""

ENGINE = """
import multiprocessing, vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor
for module in (vllm.v1.engine.utils, vllm.v1.executor.multiproc_executor):
    module.get_mp_context = lambda: multiprocessing.get_context("fork")
MODEL, REPLICA, prompt = {model!r}, {replica!r}, {{"prompt_token_ids": [5, 6, 7]}}
options = dict(max_model_len=128, enforce_eager=True, skip_tokenizer_init=True, block_size=32, distributed_executor_backend="mp")
"""


@needs_vllm
class Page(unittest.TestCase):
    def test_its_blocks_refit_an_engine(self):
        page = (fleet.ROOT / "docs/vllm.md").read_text()
        blocks = {name: block for _, name, block in re.findall(r"```(yaml|python) (\w+)\n(.*?)```", page, re.S)}
        scratch = tempfile.TemporaryDirectory()
        self.addCleanup(scratch.cleanup)
        directory, model = scratch.name, f"{scratch.name}/model"
        qwen.save(model, {name: tensor.bfloat16() for name, tensor in qwen.model(seed=1).state_dict().items()})
        files = [pathlib.Path(directory, name) for name in ("refit.yaml", "config.yaml")]
        files[0].write_text(blocks["refit"])
        config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "qwen-config", "namespace": "rl"}}
        files[1].write_text(json.dumps(config | {"data": {"config.json": json.dumps(qwen.CONFIG)}}))
        of = fleet.Fleet(*files)
        self.addCleanup(of.close)
        seat = next(word for words in of.agents.values() for word in words if word.startswith("inference/"))
        values = {"path": [str(HERE), str(HERE.parent)], "model": model, "group": f"{directory}/group", "replica": seat.split("/")[2]}
        programs = [(f"trainer-{rank}", TRAINER.format(rank=rank, **values) + blocks["trainer"], "training/0") for rank in range(2)]
        programs.append(("engine", ENGINE.format(**values) + blocks["engine"], seat))
        env = {"PYTHONPATH": installed(directory), "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "HF_HUB_OFFLINE": "1"}
        processes = []
        for name, program, where in programs:
            processes.append(Process(name, [sys.executable, "-c", program], directory, WEIGHTREFIT_SOCKET=of.socket_of(where), **env))
            self.addCleanup(processes[-1].kill)
        for process in processes:
            out, _ = process.process.communicate(timeout=STARTING)
            self.assertEqual(process.process.returncode, 0, process.log.read_text(errors="replace")[-6000:])
        self.assertRegex(out, r"(?m)^0\.[12] \[\d+")


if __name__ == "__main__":
    unittest.main()
