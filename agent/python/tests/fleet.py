"""A coordinator and agents of the real binaries, for tests of the client.

tests/local/tiny.yaml: three training ranks that hold every tensor in f32, cut by rows as FSDP2 does (2000 rows become
667, 667, 666); replicas of two ranks that hold it in bf16, with q, k and v fused and the embedding padded to 2048 rows.
"""

import contextlib
import json
import logging
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "agent" / "python"))

# What the client logs would stand between a test's name and its result.
logging.getLogger("weightrefit").addHandler(logging.NullHandler())

# For what takes milliseconds unless the machine is busy; reached only by a test that fails.
PATIENCE = 60.0


def binary(name):
    return os.path.join(os.environ["WEIGHTREFIT_BIN"], name)


def wait_for(what, look):
    """Waits until `look` gives something true. It polls, since what is waited for is in another process."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} within {PATIENCE} s")
        time.sleep(0.005)
    return found


class Fleet:
    """One refit without Kubernetes: `weightrefit coordinate` and the agents that it names."""

    def __init__(self, *files, replicas=1, without=(), arguments=()):
        self.directory = pathlib.Path(tempfile.mkdtemp(prefix="weightrefit-"))
        self._processes = {}
        try:
            self._files, self._replicas, self._arguments = files, replicas, arguments
            self.coordinate("127.0.0.1:0")
            absent = [self.pod_of(seat) for seat in without]
            for pod in self.agents:
                if pod not in absent:
                    self.start(pod)
        except BaseException:
            self.close()
            raise

    def coordinate(self, listen):
        """Starts the coordinator and reads which agents it wants."""
        command = [binary("weightrefit"), "coordinate", "--listen", listen, "-o", "json"]
        command += ["--directory", str(self.directory / "tokens"), "--replicas", str(self._replicas)]
        for file in self._files:
            command += ["-f", str(file)]
        process = self._start("coordinator", command, stdout=subprocess.PIPE)
        self.started = self._read_document(process.stdout)
        self.agents = {agent["podUid"]: agent["arguments"] for agent in self.started["agents"]}

    def start(self, pod, **changes):
        """Starts the pod's agent and waits until its socket is there; with `changes` to its arguments it may never be."""
        number = list(self.agents).index(pod) + 2
        arguments = [changes.get(argument, argument) for argument in self.agents[pod]]
        command = [binary("weightrefit-agent"), *arguments, *self._arguments]
        command += ["--socket", self.socket(pod), "--listen", f"127.0.0.{number}"]
        command += ["--exit-with-parent", str(os.getpid())]
        self._start(pod, command)
        if not changes:
            wait_for("socket", lambda: os.path.exists(self.socket(pod)))

    def kill(self, name):
        """Ends a pod's agent, or the coordinator, as the kernel would."""
        process = self._processes.pop(name)
        process.send_signal(signal.SIGKILL)
        process.wait()
        if process.stdout:
            process.stdout.close()

    def restart(self, pod):
        """Ends it and starts it anew, with another incarnation."""
        self.kill(pod)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.socket(pod))
        self.start(pod)

    def pod_of(self, seat):
        return next(pod for pod, arguments in self.agents.items() if seat in arguments)

    def socket(self, pod):
        return str(self.directory / f"{list(self.agents).index(pod)}" / "agent.sock")

    def socket_of(self, seat):
        return self.socket(self.pod_of(seat))

    def log(self, name):
        return (self.directory / f"{name}.log").read_text(errors="replace")

    def logs(self):
        return "\n".join(f"--- {log.stem}\n{log.read_text(errors='replace')}" for log in self.directory.glob("*.log"))

    def close(self):
        for name in list(self._processes):
            self.kill(name)
        shutil.rmtree(self.directory)

    def _start(self, name, command, stdout=subprocess.DEVNULL):
        with open(self.directory / f"{name}.log", "ab") as log:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=log)
        self._processes[name] = process
        return process

    def _read_document(self, stdout):
        text = ""
        while line := stdout.readline().decode():
            text += line
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(text)
        raise AssertionError(f"the coordinator ended:\n{self.log('coordinator')}")


def has_failed(test):
    """Whether a test has failed so far; asked in a cleanup, where unittest's own flag speaks of the cleanup."""
    result = test._outcome.result
    return any(failed is test for failed, _ in result.failures + result.errors)


class FleetTest(unittest.TestCase):
    """Starts a fleet, and shows its logs where the test fails."""

    FILES = (ROOT / "tests/local/tiny.yaml",)
    REPLICAS = 1
    WITHOUT = ()
    # Of every agent, beside its own.
    ARGUMENTS = ()

    def setUp(self):
        self.fleet = Fleet(*self.FILES, replicas=self.REPLICAS, without=self.WITHOUT, arguments=self.ARGUMENTS)
        self.addCleanup(self._end)

    def _end(self):
        if has_failed(self):
            print(self.fleet.logs(), file=sys.stderr)
        self.fleet.close()


def together(*calls):
    """Runs all calls at once and returns what they return; raises what the first of them raises."""
    results, errors = [None] * len(calls), []

    def run(index, call):
        try:
            results[index] = call()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=each) for each in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
