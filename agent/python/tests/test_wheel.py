"""The wheel: what `make wheel` makes runs where nothing else is installed, and promises no more than its programs keep."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest
import venv
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).parent))
import fleet  # noqa: E402

PACKAGE = fleet.ROOT / "agent/python"
PROGRAMS = ("weightrefit", "weightrefit-agent")
LIBRARY = "libweightrefit.so"
PACKAGES = (*PROGRAMS, "weightrefit-library")


def run(*command, **options):
    return subprocess.run([str(word) for word in command], capture_output=True, text=True, stdin=subprocess.DEVNULL, **options)


def pack(out, programs):
    """Makes a wheel of the compiled programs of a folder, or of none."""
    pip = [sys.executable, "-m", "pip", "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", out, PACKAGE]
    done = run(*pip, env=os.environ | {"WEIGHTREFIT_BIN": str(programs)})
    return done, next(iter(pathlib.Path(out).glob("*.whl")), None)


def compile_c(out, text, *options):
    command = [os.environ.get("CC", "cc"), "-x", "c", "-", "-o", out, *options]
    subprocess.run(command, input=text, text=True, check=True)


class OfThePrograms(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = pathlib.Path(folder.name)
        done, cls.wheel = pack(cls.folder, os.environ["WEIGHTREFIT_BIN"])
        assert cls.wheel is not None, done.stderr

    def test_a_fresh_environment_refits_with_the_wheel_alone(self):
        venv.create(self.folder / "env")
        programs = self.folder / "env/bin"
        python = programs / "python"
        run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", self.wheel, check=True)
        version = self.wheel.name.split("-")[1]
        for program in PROGRAMS:
            self.assertEqual(run(programs / program, "--version").stdout, f"{program} {version}\n")
        self.assertEqual(run(python, "-I", "-c", "import weightrefit; print('typed')").stdout, "typed\n")
        done = run(python, "-I", PACKAGE / "tests/installed_refit.py")
        self.assertEqual(done.stdout, "1 Committed\n2 Committed\n", done.stderr)
        loading = "from weightrefit import executor; print(executor._load(None, 'x').weightrefit_version().decode())"
        done = run(python, "-I", "-c", loading)
        self.assertEqual(done.stdout, f"{version}\n", done.stderr)

    def test_its_tag_names_the_oldest_library_that_has_every_symbol(self):
        tag = re.fullmatch(rf".*-py3-none-manylinux_(\d+)_(\d+)_{os.uname().machine}\.whl", self.wheel.name)
        symbols = "".join(run("readelf", "--wide", "--dyn-syms", fleet.binary(program), check=True).stdout for program in (*PROGRAMS, LIBRARY))
        asked = {kind: re.findall(rf"{kind} .*@GLIBC_(\d+)\.(\d+)", symbols) for kind in ("GLOBAL", "WEAK")}
        asked = {kind: {(int(major), int(minor)) for major, minor in found} for kind, found in asked.items()}
        named = int(tag[1]), int(tag[2])
        self.assertGreaterEqual(named, max(asked["GLOBAL"]))
        self.assertIn(named, asked["GLOBAL"] | asked["WEAK"])
        with zipfile.ZipFile(self.wheel) as archive:
            names = {name.split("/", 1)[1] for name in archive.namelist()}
        self.assertLess({"py.typed", "licenses/LICENSE", *(f"scripts/{p}" for p in PROGRAMS), *(f"sboms/{p}.cdx.json" for p in PACKAGES)}, names)
        with zipfile.ZipFile(self.wheel) as archive:
            self.assertIn(f"weightrefit/{LIBRARY}", archive.namelist())


class OfOtherPrograms(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def test_without_programs_it_is_the_client_for_every_machine(self):
        _, wheel = pack(self.folder, "")
        self.assertTrue(wheel.name.endswith("-py3-none-any.whl"), wheel.name)
        with zipfile.ZipFile(wheel) as archive:
            self.assertEqual([name for name in archive.namelist() if ".data/" in name or "sboms" in name], [])

    def test_a_static_program_asks_for_no_library_and_one_that_few_machines_can_start_is_refused(self):
        for name in PROGRAMS:
            compile_c(self.folder / name, "int main(void) { return 0; }", "-static")
        compile_c(self.folder / LIBRARY, "int none;", "-shared", "-fPIC", "-nostdlib")
        _, wheel = pack(self.folder / "static", self.folder)
        self.assertIn("-py3-none-manylinux_2_17_", wheel.name)
        compile_c(self.folder / "libown.so", "int own(void) { return 0; }", "-shared", "-fPIC")
        compile_c(self.folder / PROGRAMS[1], "int own(void); int main(void) { return own(); }", f"-L{self.folder}", "-lown")
        done, wheel = pack(self.folder / "own", self.folder)
        self.assertIsNone(wheel)
        self.assertIn("weightrefit-agent needs libown.so, which not every machine has", done.stdout + done.stderr)


if __name__ == "__main__":
    unittest.main()
