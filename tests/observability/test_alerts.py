"""The chart's alerts: promtool takes them, and each fires when it must and is silent when it must be."""

import copy
import pathlib
import re
import subprocess
import tempfile
import unittest

import yaml

from tests.rendered import ROOT, prometheus, rules

CASES = ROOT / "tests/observability/alerts"


def promtool(folder, *arguments):
    command = [prometheus() / "promtool", *arguments]
    done = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.returncode, done.stdout


class Alerts(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, spec):
        (self.folder / "rules.yaml").write_text(yaml.safe_dump(spec))

    def test_rules_and_the_templates_of_their_texts_are_well_formed(self):
        self.write(rules())
        code, said = promtool(self.folder, "check", "rules", "--lint=all", "--lint-fatal", "rules.yaml")
        self.assertEqual(code, 0, said)

    def test_each_fires_when_it_must_and_is_silent_when_it_must_be(self):
        spec = copy.deepcopy(rules())
        alerts = [rule for rule in spec["groups"][0]["rules"] if "alert" in rule]
        for rule in alerts:
            del rule["annotations"]  # promtool would want each case to repeat them
        self.write(spec)
        cases = {path.name.removesuffix(".test.yaml"): path for path in CASES.iterdir()}
        self.assertEqual({rule["alert"] for rule in alerts}, set(cases))
        for name, path in cases.items():
            (self.folder / path.name).write_text(path.read_text())
            tests = yaml.safe_load(path.read_text())["tests"]
            expected = [bool(case["exp_alerts"]) for test in tests for case in test["alert_rule_test"]]
            self.assertEqual({True, False}, set(expected), f"{name} has a case of each kind")
            named = {case["alertname"] for test in tests for case in test["alert_rule_test"]}
            self.assertEqual(named, {name})
        code, said = promtool(self.folder, "test", "rules", *sorted(path.name for path in cases.values()))
        self.assertEqual(code, 0, said)


class Names(unittest.TestCase):
    """docs/metrics.md is compared with the code, so what it has exists."""

    def test_alerts_and_panels_ask_for_metrics_that_exist(self):
        page = (ROOT / "docs/metrics.md").read_text()
        kinds = dict(re.findall(r"(?m)^\| `(weightrefit_\w+)` \| (\w+) \|", page))
        known = set(kinds) | {
            f"{name}_{part}" for name, kind in kinds.items() if kind == "histogram" for part in ("bucket", "sum", "count")
        }
        chart = ROOT / "charts/weightrefit/files"
        for file in (chart / "alerts.yaml", *(chart / "dashboards").iterdir()):
            asked = set(re.findall(r"\bweightrefit_(?:agent|operator)_\w+", file.read_text()))
            self.assertTrue(asked and asked <= known, f"{file.name}: {asked - known}")


if __name__ == "__main__":
    unittest.main()
