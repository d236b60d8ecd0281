"""The charts as helm renders them, and the pinned programs that look at them."""

import functools
import pathlib
import subprocess
import unittest

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHART, CRDS = ROOT / "charts/weightrefit", ROOT / "charts/weightrefit-crds"
NAMESPACE = "weightrefit-system"


@functools.cache
def program(build):
    """What the script of this path in the checkout has built or fetched, and prints the place of."""
    return subprocess.run([ROOT / build], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


@functools.cache
def prometheus():
    """Folder of prometheus and promtool. Debian keeps no package for ever, and not everybody has Debian: who cannot have
    them skips the tests that need them, and says why."""
    done = subprocess.run([ROOT / "tests/observability/build"], capture_output=True, text=True)
    if done.returncode:
        raise unittest.SkipTest(done.stderr.strip().splitlines()[-1].removeprefix("weightrefit: "))
    return pathlib.Path(done.stdout.strip())


def values():
    """The sets of values that the chart must do with, by name."""
    return sorted((CHART / "ci").glob("*.yaml"))


def helm(*arguments):
    """Exit code, standard output, standard error."""
    run = subprocess.run([program("tests/helm/build"), *map(str, arguments)], capture_output=True, text=True)
    return run.returncode, run.stdout, run.stderr


def text(chart, *arguments):
    code, out, err = helm("template", "wr", chart, "--namespace", NAMESPACE, *arguments)
    assert code == 0, err
    return out


def render(chart, *arguments):
    return [document for document in yaml.safe_load_all(text(chart, *arguments)) if document]


def one(objects, kind, name=None):
    found = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    assert len(found) == 1, (kind, name, len(found))
    return found[0]


@functools.cache
def rules(*arguments):
    """The spec of the PrometheusRule, with all alerts unless the arguments say otherwise. Not to be changed."""
    objects = render(CHART, "--set", "metrics.prometheusRule.enabled=true", *arguments)
    return one(objects, "PrometheusRule")["spec"]
