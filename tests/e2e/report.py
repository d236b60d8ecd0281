"""Steps of a scenario, counted."""

import contextlib
import time
import traceback

WAIT_SECONDS = 180  # for what takes seconds on an idle machine


class Ended(Exception):
    """A step failed that the others build upon."""


class Report:
    def __init__(self, explain):
        self.passed, self.failed, self.skipped, self.explain = 0, 0, 0, explain
        self.start = time.monotonic()

    @contextlib.contextmanager
    def step(self, name, is_base=False):
        begun = time.monotonic()
        try:
            yield
        except Exception as error:
            self.failed += 1
            print(f"FAILED {name} after {time.monotonic() - begun:.1f} s: {error}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=-3)
            self.explain()
            if is_base:
                raise Ended(name) from error
        else:
            self.passed += 1
            print(f"ok     {name} ({time.monotonic() - begun:.1f} s)", flush=True)

    def skip(self, name, reason):
        self.skipped += 1
        print(f"skipped {name}: {reason}", flush=True)

    def last_line(self):
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


def wait(what, look, seconds=WAIT_SECONDS):
    """What `look` finds once it finds something; what it raises meanwhile may pass."""
    deadline, last = time.monotonic() + seconds, None
    while True:
        try:
            if found := look():
                return found
        except Exception as error:  # noqa: BLE001 -- the API server may be away, an object not there yet
            last = error
        if time.monotonic() > deadline:
            raise AssertionError(f"no {what} within {seconds} s{f' ({last})' if last else ''}")
        time.sleep(0.3)
