"""The package as such: what importing it costs, what it shares with the other parts of the repository."""

import json
import pathlib
import pickle
import subprocess
import sys
import tomllib
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet  # noqa: E402

import weightrefit  # noqa: E402
from weightrefit import codes, session, tensor, trainer, wire  # noqa: E402

PACKAGE = fleet.ROOT / "agent/python"

# Modules that cost as much as all of the package; only what needs them imports them.
SLOW = {"torch", "numpy", "asyncio", "dataclasses", "inspect"}


class Package(unittest.TestCase):
    def test_importing_it_imports_nothing_that_is_slow_to_import(self):
        # What other modules of the standard library bring on their own is not its fault.
        program = "import concurrent.futures, json, logging, socket, sys, typing; had = set(sys.modules); import weightrefit; "
        program += f"print({SLOW} & (set(sys.modules) - had))"
        done = subprocess.run([sys.executable, "-c", program], cwd=PACKAGE, capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout, "set()\n")

    def test_codes_and_remedies_are_those_of_the_command_line(self):
        command = [fleet.binary("weightrefit"), "explain", "-o", "json"]
        told = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["codes"]
        self.assertEqual(codes.REMEDIES, {code["code"]: code["remedy"] for code in told})
        retried = {code["code"] for code in told if "tried again" in code["policy"]}
        self.assertEqual(codes.RETRIED, retried)

    def test_every_code_that_is_raised_is_one(self):
        words = set()
        for file in (PACKAGE / "weightrefit").rglob("*.py"):
            text = file.read_text()
            for opening in ("Misuse(", "ProtocolError(", "AgentUnreachable(", "DeadlineExceeded(", "Closed(", "Refused("):
                words.update(part.split('"')[1] for part in text.split(opening)[1:] if part.startswith('"'))
        self.assertGreater(len(words), 5)
        self.assertEqual(words - set(codes.REMEDIES), set())

    def test_what_is_raised_can_be_sent_to_another_process(self):
        kinds = [each for each in vars(weightrefit).values() if isinstance(each, type) and issubclass(each, weightrefit.WeightrefitError)]
        self.assertGreater(len(kinds), 5)
        for kind in kinds:
            report = {"report": weightrefit.Report.disabled(7)} if kind is weightrefit.RefitFailed else {}
            raised = kind("Busy", "too much", rank="training/0", **report)
            arrived = pickle.loads(pickle.dumps(raised))
            self.assertEqual((type(arrived), str(arrived), vars(arrived)), (kind, str(raised), vars(raised)))

    def test_its_version_is_that_of_the_binaries(self):
        project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
        cargo = tomllib.loads((fleet.ROOT / "Cargo.toml").read_text())["workspace"]["package"]
        self.assertEqual((project["version"], project["dependencies"]), (cargo["version"], []))
        self.assertTrue((PACKAGE / "weightrefit/py.typed").exists())

    def test_bounds_and_dtypes_are_those_of_the_agent(self):
        rust = {name: (fleet.ROOT / name).read_text() for name in ("proto/src/socket.rs", "core/src/dtype.rs")}
        self.assertIn(f"FRAME_FDS_MAX: usize = {wire.FRAME_FDS_MAX};", rust["proto/src/socket.rs"])
        self.assertIn("FRAME_BYTES_MAX: usize = 16 << 20;", rust["proto/src/socket.rs"])
        self.assertEqual(wire.FRAME_BYTES_MAX, 16 << 20)
        self.assertIn(f"PROTOCOL: u32 = {wire.PROTOCOL};", rust["proto/src/socket.rs"])
        names = [line.split('"')[1] for line in rust["core/src/dtype.rs"].split("torch_name")[0].splitlines() if '=> "' in line]
        self.assertEqual(names, list(tensor.DTYPES))
        self.assertIn(session.SOCKET_VARIABLE, weightrefit.__doc__)


class Pages(unittest.TestCase):
    def test_every_tensor_is_on_one_page_and_every_memory_rides_once(self):
        tensors = [weightrefit.Tensor(f"{'x' * 200}.{n}", "bf16", (n % 7, 3)) for n in range(100_000)]
        pages = trainer._pages(weightrefit.place(tensors))
        frames = [frame for frame, _ in pages]
        self.assertEqual([frame["page"] for frame in frames], list(range(len(frames))))
        self.assertEqual({frame["pages"] for frame in frames}, {len(frames)})
        self.assertEqual([t["name"] for frame in frames for t in frame["tensors"]], [t.name for t in tensors])
        self.assertEqual([len(fds) for _, fds in pages], [1] + [0] * (len(pages) - 1))
        self.assertLess(max(len(wire.encode(frame)) for frame in frames), wire.FRAME_BYTES_MAX)

    def test_a_page_carries_no_more_descriptors_than_a_frame_may(self):
        placed = [weightrefit.place([weightrefit.Tensor(f"t{n}", "u8", (n,))])[0] for n in range(150)]
        pages = trainer._pages(placed + placed[:1])
        self.assertEqual([len(fds) for _, fds in pages], [64, 64, 22])
        self.assertEqual([len(frame["memories"]) for frame, _ in pages], [64, 64, 22])
        at = [t["at"]["memory"] for frame, _ in pages for t in frame["tensors"]]
        self.assertEqual(at, [*range(150), 0])

    def test_tensors_begin_at_cache_lines_and_do_not_overlap(self):
        placed = weightrefit.place(weightrefit.Tensor(str(n), "f32", (n,)) for n in (3, 0, 17, 1))
        self.assertEqual([p.offset for p in placed], [0, 64, 64, 192])
        for number, p in enumerate(placed):
            p.buffer[:] = bytes([number + 1]) * p.tensor.nbytes
        self.assertEqual([set(bytes(p.buffer)) for p in placed], [{1}, set(), {3}, {4}])
        self.assertEqual(placed[0].memory.nbytes, 256)
        self.assertEqual(weightrefit.place([])[:], [])


if __name__ == "__main__":
    unittest.main()
