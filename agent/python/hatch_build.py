"""Puts the programs into the wheel: `weightrefit`, `weightrefit-agent` and the library `libweightrefit.so` out of the folder that
`WEIGHTREFIT_BIN` names.

Without that variable the wheel is the client alone and fits every machine: pods get their agent from the operator. A wheel
with programs says which machines run it, as what the programs ask of the C library has it; no more is promised than that.
"""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = pathlib.Path(__file__).resolve().parents[2]

# Program -> package of the workspace that makes it.
PROGRAMS = {"weightrefit": "weightrefit", "weightrefit-agent": "weightrefit-agent"}

# Lies in the package, where the client looks for it.
LIBRARY = "libweightrefit.so"
COMPILED = PROGRAMS | {LIBRARY: "weightrefit-library"}

# What every machine with a manylinux tag has (PEP 600): the C library and its loader, and the compiler's unwinder.
EVERYWHERE = r"(libc|libm|libdl|librt|libpthread|libgcc_s)\.so\.\d|ld-linux-[\w-]+\.so\.\d"

# The oldest C library of a manylinux tag that pip still meets; a static program asks for none.
OLDEST = (2, 17)

MACHINES = {"Advanced Micro Devices X86-64": "x86_64", "AArch64": "aarch64"}


class Programs(BuildHookInterface):
    PLUGIN_NAME = "custom"

    def initialize(self, version, build_data):
        folder = os.environ.get("WEIGHTREFIT_BIN")
        if not folder:
            return
        self._made = tempfile.TemporaryDirectory()
        made = pathlib.Path(self._made.name)
        for program, package in COMPILED.items():
            subprocess.run(["strip", "--strip-debug", "-o", made / program, pathlib.Path(folder, program)], check=True)
            contents = subprocess.run([sys.executable, ROOT / "images/sbom", package], check=True, stdout=subprocess.PIPE).stdout
            (made / f"{package}.cdx.json").write_bytes(contents)
        build_data["shared_scripts"] = {str(made / program): program for program in PROGRAMS}
        build_data["force_include"][str(made / LIBRARY)] = f"weightrefit/{LIBRARY}"
        build_data["sbom_files"] = [str(made / f"{package}.cdx.json") for package in COMPILED.values()]
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform([made / program for program in COMPILED])}"

    def finalize(self, version, build_data, artifact_path):
        if hasattr(self, "_made"):
            self._made.cleanup()


def platform(programs):
    """The platform tag of a wheel with these programs."""
    machines, glibc = set(), [OLDEST]
    for program in programs:
        command = ["readelf", "--wide", "--file-header", "--dynamic", "--version-info", program]
        told = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=os.environ | {"LC_ALL": "C"}).stdout
        machines.add(MACHINES[re.search(r"Machine:\s+(.+)", told)[1]])
        for library in re.findall(r"Shared library: \[(.+)\]", told):
            if not re.fullmatch(EVERYWHERE, library):
                sys.exit(f"{program.name} needs {library}, which not every machine has")
        # The loader starts a program that lacks nothing but versions marked as weak.
        for name in re.findall(r"Name: (GLIBC_\S+)\s+Flags: none", told):
            numbers = re.fullmatch(r"GLIBC_(\d+)\.(\d+)(\.\d+)?", name)
            if numbers is None:
                sys.exit(f"{program.name} needs {name} of the C library, which no tag names")
            glibc.append((int(numbers[1]), int(numbers[2])))
    if len(machines) != 1:
        sys.exit(f"programs of {' and '.join(sorted(machines))} in one wheel")
    return "manylinux_{}_{}_{}".format(*max(glibc), *machines)
