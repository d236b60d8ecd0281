#!/usr/bin/env python3
"""Keeps compiled crates and the checkout that they are used from in step: `tests/fresh.py COMMAND…` runs the command so.

Cargo recompiles what changed since it was compiled, by the times of the files. That goes wrong in both directions when
several checkouts share one folder of compiled crates: a new clone is compiled whole, since all its files are new; and
what another checkout compiled after this one was made counts as this one's. So after each command the contents and
times of all sources are noted beside the crates, with the checkout's path. Before the next one, files with the same
content get the same time again; where the note cannot vouch for the crates, because another checkout made them or cargo
ran without it, the workspace's own are forgotten.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys


@contextlib.contextmanager
def in_step(root, target):
    """While the context lasts nobody else compiles into `target`, and what lies there is of the checkout `root`."""
    root, target = pathlib.Path(root).resolve(), pathlib.Path(target)
    target.mkdir(parents=True, exist_ok=True)
    note = target / "sources.json"
    # Beside the folder, since whoever deletes it must not make room for a second holder; hidden, as it is none.
    with (target.parent / f".{target.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another checkout that uses {target}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        restore(root, target, note)
        try:
            yield
        finally:
            write(root, target, note)


def restore(root, target, note):
    """Gives unchanged files the time that they had, or forgets what was compiled from others."""
    try:
        noted, newest = json.loads(note.read_text()), note.stat().st_mtime_ns
    except (OSError, ValueError):
        noted, newest = {}, 0
    if noted.get("root") != str(root) or noted.get("compiled") != compiled(target):
        forget(target)
        return
    was = noted["sources"]
    for path, (digest, time) in (sources(root) or {}).items():
        if path in was and was[path][0] == digest:
            os.utime(root / path, ns=(was[path][1], was[path][1]))
        elif time <= newest:
            os.utime(root / path)  # other content under an old time, as a copy from elsewhere has


def forget(target):
    """Makes cargo compile all crates of the workspace, and leaves none of their programs to be run by mistake."""
    for folder in fingerprints(target):
        shutil.rmtree(folder)
    for program in target.glob("*/weightrefit*"):
        if program.is_file():
            program.unlink()


def write(root, target, note):
    """Notes what the crates were compiled from."""
    now = sources(root)
    if now is None or not target.is_dir():
        return
    noted = {"root": str(root), "compiled": compiled(target), "sources": now}
    whole = note.with_suffix(".new")
    whole.write_text(json.dumps(noted))
    whole.replace(note)


def sources(root):
    """Path -> [digest of the content, time in nanoseconds] of all files that git has or would take; None without git."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True
    )
    if listed.returncode:
        return None
    files = {}
    for path in filter(None, listed.stdout.split("\0")):
        with contextlib.suppress(OSError), (root / path).open("rb") as file:  # deleted, or a link to nowhere
            files[path] = [hashlib.file_digest(file, "sha256").hexdigest(), os.stat(root / path).st_mtime_ns]
    return files


def fingerprints(target):
    """Cargo's own notes on the workspace's crates, one folder per compiled thing."""
    return sorted(target.glob("*/.fingerprint/weightrefit*"))


def compiled(target):
    """Digest that changes with every compilation of one of the workspace's crates."""
    files = (file for folder in fingerprints(target) for file in sorted(folder.iterdir()))
    told = "\n".join(f"{file.relative_to(target)} {file.stat().st_mtime_ns}" for file in files)
    return hashlib.sha256(told.encode()).hexdigest()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was compiled is noted
    with in_step(pathlib.Path(__file__).parent.parent, os.environ["CARGO_TARGET_DIR"]):
        signal.signal(signal.SIGINT, lambda *_: None)  # the command hears Ctrl-C too, and ends as it likes
        code = subprocess.call(sys.argv[1:])
    sys.exit(code if code >= 0 else 128 - code)
