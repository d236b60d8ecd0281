"""The charts: helm's own checks, values that must be refused, and what the rendered objects must say to each other."""

import functools
import pathlib
import subprocess
import unittest

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
CHART, CRDS = ROOT / "charts/weightrefit", ROOT / "charts/weightrefit-crds"


@functools.cache
def program():
    return subprocess.run([ROOT / "tests/helm/build"], check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


def helm(*arguments):
    """Exit code, standard output, standard error."""
    run = subprocess.run([program(), *map(str, arguments)], capture_output=True, text=True)
    return run.returncode, run.stdout, run.stderr


def render(chart, *arguments):
    code, out, err = helm("template", "wr", chart, "--namespace", "weightrefit-system", *arguments)
    assert code == 0, err
    return [document for document in yaml.safe_load_all(out) if document]


def one(objects, kind, name=None):
    found = [o for o in objects if o["kind"] == kind and name in (None, o["metadata"]["name"])]
    assert len(found) == 1, (kind, name, len(found))
    return found[0]


class Charts(unittest.TestCase):
    def test_helm_finds_nothing_to_mend(self):
        for chart in (CHART, CRDS):
            code, out, err = helm("lint", "--strict", chart)
            self.assertEqual(code, 0, out + err)
        for values in sorted((CHART / "ci").glob("*.yaml")):
            code, out, err = helm("lint", "--strict", CHART, "--values", values)
            self.assertEqual(code, 0, f"{values.name}: {out}{err}")

    def test_unknown_and_wrong_values_are_refused(self):
        for setting in (
            "replicacount=2",
            "image.tga=x",
            "webhook.failurePolicy=Maybe",
            "webhook.timeoutSeconds=31",
            "replicaCount=two",
            "replicaCount=0",
            "image.digest=sha256:12",
            "injection.profiles.default.gpu=1",
            "injection.tokenExpirationSeconds=5",
            "metrics.podMonitor.interval=often",
        ):
            code, _, err = helm("template", "wr", CHART, "--set", setting)
            self.assertNotEqual(code, 0, setting)
            self.assertIn("schema", err, setting)

    def test_parts_of_the_release_find_each_other(self):
        for values in sorted((CHART / "ci").glob("*.yaml")):
            with self.subTest(values.name):
                objects = render(CHART, "--values", values)
                deployment = one(objects, "Deployment")
                template = deployment["spec"]["template"]
                labels = template["metadata"]["labels"].items()
                selectors = [deployment["spec"]["selector"]["matchLabels"], one(objects, "Service")["spec"]["selector"]]
                for selector in selectors:
                    self.assertLessEqual(selector.items(), labels)
                account = one(objects, "ServiceAccount")["metadata"]["name"]
                self.assertEqual(template["spec"]["serviceAccountName"], account)
                (container,) = template["spec"]["containers"]
                ports = {port["name"] for port in container["ports"]}
                service = {port["name"]: port for port in one(objects, "Service")["spec"]["ports"]}
                self.assertLessEqual({port["targetPort"] for port in service.values()}, ports)
                settings = yaml.safe_load(one(objects, "ConfigMap")["data"]["injection.yaml"])
                host, port = settings["coordinator"].split(":")
                self.assertEqual((host, int(port)), ("weightrefit-operator.weightrefit-system.svc", service["agents"]["port"]))
                self.assertIn(f"--audience={settings['audience']}", container["args"])
                hooks = [o for o in objects if o["kind"] == "MutatingWebhookConfiguration"]
                self.assertEqual(bool(hooks), f"--webhook-host={host}" in container["args"])
                for hook in hooks:
                    (webhook,) = hook["webhooks"]
                    target = webhook["clientConfig"]["service"]
                    self.assertEqual(target["port"], service["webhook"]["port"])
                    self.assertEqual(f"{target['name']}.{target['namespace']}.svc", host)
                    # Nobody else's pods may wait for us.
                    keys = {entry["key"] for entry in webhook["objectSelector"]["matchExpressions"]}
                    self.assertEqual(keys, {"weightrefit.dev/refit"})
                    rule = [
                        rule
                        for rule in one(objects, "ClusterRole")["rules"]
                        if "mutatingwebhookconfigurations" in rule["resources"]
                    ]
                    self.assertEqual(rule[0]["resourceNames"], [hook["metadata"]["name"]])

    def test_rights_are_those_that_the_operator_is_tested_with(self):
        text = (CHART / "files/operator-rbac.yaml").read_text()
        kinds = {}
        for document in yaml.safe_load_all(text):
            kinds[document["kind"]] = document
        objects = render(CHART)
        for kind, document in kinds.items():
            rendered = one(objects, kind)
            for part in ("rules", "roleRef", "subjects"):
                self.assertEqual(rendered.get(part), document.get(part), kind)

    def test_the_definition_is_that_of_the_binary_and_stays(self):
        definition = yaml.safe_load((ROOT / "crds/weightrefits.weightrefit.dev.yaml").read_text())
        (rendered,) = render(CRDS)
        annotations = rendered["metadata"].pop("annotations")
        self.assertEqual(annotations, {"helm.sh/resource-policy": "keep"})
        self.assertEqual(rendered, definition)
        (rendered,) = render(CRDS, "--set", "keep=false")
        self.assertEqual(rendered, definition)


if __name__ == "__main__":
    unittest.main()
