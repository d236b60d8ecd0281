"""Real FSDP2 in float32, real agents, real vLLM in bfloat16: what a refitted engine says is what one says that was
started on the checkpoint."""

import contextlib
import json
import os
import pathlib
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

try:
    import vllm  # noqa: F401
except ImportError:
    vllm = None

needs_vllm = unittest.skipIf(vllm is None, "vLLM is not installed: `make test-engines` fetches it and runs this")

HERE = pathlib.Path(__file__).parent
PROMPTS = [[(7 * i + 3 * j) % 490 + 5 for j in range(70 + 9 * i)] for i in range(4)]

# Seconds: a process imports vLLM, and starts an engine of two workers, on a machine that does other things too.
STARTING = 600.0

# Two engines on one checkpoint differ on a CPU by about an ulp of a bfloat16 logit, without any refit; greedy tokens do
# not, and one engine repeats itself exactly.
LOGPROB_NOISE = 0.1


def installed(directory):
    """The package as pip installs it, with the entry point that vLLM looks for."""
    source = shutil.copytree(HERE.parent, f"{directory}/source", ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-build-isolation"]
    subprocess.run([*command, "--target", f"{directory}/site", source], check=True, stdin=subprocess.DEVNULL)
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

    WORLD = 3

    def __init__(self, layout, replicas=1, tensor_parallel=2):
        self.directory = tempfile.mkdtemp(prefix="weightrefit-")
        self.tensor_parallel = tensor_parallel
        self.site = installed(self.directory)
        self._processes = []
        file = qwen.resource(f"{self.directory}/refit.yaml", self.WORLD, tensor_parallel, layout, replicas)
        self.fleet = fleet.Fleet(file, replicas=replicas)
        # The engines start on weights that no version has.
        self.first = f"{self.directory}/first"
        qwen.save(self.first, {name: tensor.bfloat16() for name, tensor in qwen.model(seed=1).state_dict().items()})
        self.replicas = sorted({seat.split("/")[2] for words in self.fleet.agents.values() for seat in words if seat.startswith("inference/")})

    def train(self):
        file = f"{self.directory}/group"
        ranks = []
        for rank in range(self.WORLD):
            command = [sys.executable, str(HERE / "qwen_rank.py"), str(rank), str(self.WORLD), file, self.fleet.socket_of(f"training/{rank}")]
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
        self.addCleanup(lambda: bed.close(show=not self._outcome.success))
        return bed

    def assert_same_words(self, got, want):
        self.assertEqual([tokens for tokens, _ in got], [tokens for tokens, _ in want])
        for (_, one), (_, other) in zip(got, want):
            for a, b in zip(one, other):
                # The fifth and the sixth likeliest may change places.
                for token in a.keys() & b.keys():
                    self.assertAlmostEqual(a[token], b[token], delta=LOGPROB_NOISE)


@needs_vllm
class Refitted(BedTest):
    def test_a_refitted_engine_says_what_a_fresh_one_says_for_three_versions_and_back_to_the_first(self):
        bed = self.bed(qwen.preset(2))
        bed.train()
        engine = bed.replica(bed.replicas[0])
        self.assertEqual(engine.answer(), "loaded")
        explained = engine.answer()["explained"]
        self.assertEqual([name for name in explained if "rotary" not in name], [])
        self.assertEqual([rank.answer() for rank in bed.ranks], ["ready"] * 3)
        seen = {}
        for step in (1, 2, 3):
            bed.trainers("train")
            bed.trainers(f"save {step}")
            self.assertEqual(bed.trainers(f"publish {step}"), ["Read"] * 3)
            self.assertEqual(bed.refit(step).outcome, "Committed")
            seen[step] = engine.do("generate", prompts=PROMPTS), engine.do("checksums")
            self.assertEqual(engine.do("version"), f"0.{step}")
        bed.trainers("load 1")
        bed.trainers("publish 4")
        self.assertEqual(bed.refit(4).outcome, "Committed")
        back = engine.do("generate", prompts=PROMPTS), engine.do("checksums")
        self.assertEqual(back, seen[1], "one engine repeats itself exactly")
        engine.end()
        for step in (1, 2, 3):
            words, sums = bed.fresh(step)
            self.assertEqual(seen[step][1], sums, "checksums of every parameter")
            self.assert_same_words(seen[step][0], words)
        self.assertEqual(len({json.dumps(words) for words, _ in seen.values()}), 3, "versions differ")


if __name__ == "__main__":
    unittest.main()
