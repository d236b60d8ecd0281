"""The charts: helm's own checks, values that must be refused, and what the rendered objects must say to each other.

`REWRITE=1 tests/run charts` records what is rendered now; commit that diff only when it is understood.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

import yaml

from tests.rendered import CHART, CRDS, NAMESPACE, ROOT, helm, one, program, render, rules, text, values

sys.path.insert(0, str(ROOT / "tests/kubeconform"))
import schemas  # noqa: E402

SNAPSHOTS = ROOT / "tests/charts"
# Texts for people, which have tests of their own; only their names are recorded.
LONG = ("weightrefit-runbooks", "weightrefit-dashboard-fleet", "weightrefit-dashboard-refit")

RIGHTS = ("operator-rbac.yaml", "people-rbac.yaml", "readiness-rbac.yaml")

class Charts(unittest.TestCase):
    def test_helm_finds_nothing_to_mend(self):
        for chart in (CHART, CRDS):
            code, out, err = helm("lint", "--strict", chart)
            self.assertEqual(code, 0, out + err)
        for file in values():
            code, out, err = helm("lint", "--strict", CHART, "--values", file)
            self.assertEqual(code, 0, f"{file.name}: {out}{err}")

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
            "metrics.prometheusRule.rules.WeightRefitStale.treshold=1",
            "metrics.prometheusRule.rules.WeightRefitStale.for=long",
            "metrics.prometheusRule.rules.WeightRefitStale.threshold=high",
            "metrics.prometheusRule.runbookUrl=here",
            "metrics.dashboards.labels.a=b",
            "cli.image.pullPolicy=Sometimes",
            "watchNamespaces=rl",
            "watchNamespaces[0]=RL",
            "injection.profiles.default.deviceAccess=Gpu",
        ):
            code, _, err = helm("template", "wr", CHART, "--set", setting)
            self.assertNotEqual(code, 0, setting)
            self.assertIn("schema", err, setting)

    def test_parts_of_the_release_find_each_other(self):
        for file in values():
            with self.subTest(file.name):
                objects = render(CHART, "--values", file)
                deployment = one(objects, "Deployment")
                template = deployment["spec"]["template"]
                labels = template["metadata"]["labels"].items()
                selectors = [deployment["spec"]["selector"]["matchLabels"], one(objects, "Service")["spec"]["selector"]]
                for selector in selectors:
                    self.assertLessEqual(selector.items(), labels)
                account = one(objects, "ServiceAccount", "weightrefit-operator")["metadata"]["name"]
                self.assertEqual(template["spec"]["serviceAccountName"], account)
                (container,) = template["spec"]["containers"]
                ports = {port["name"] for port in container["ports"]}
                service = {port["name"]: port for port in one(objects, "Service")["spec"]["ports"]}
                self.assertLessEqual({port["targetPort"] for port in service.values()}, ports)
                settings = yaml.safe_load(one(objects, "ConfigMap", "weightrefit-injection")["data"]["injection.yaml"])
                host, port = settings["coordinator"].split(":")
                self.assertEqual((host, int(port)), (f"weightrefit-operator.{NAMESPACE}.svc", service["agents"]["port"]))
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
                        for rule in one(objects, "ClusterRole", "weightrefit:operator-cluster")["rules"]
                        if "mutatingwebhookconfigurations" in rule["resources"]
                    ]
                    self.assertEqual(rule[0]["resourceNames"], [hook["metadata"]["name"]])

    def test_rights_are_those_that_the_operator_is_tested_with(self):
        objects = render(CHART, "--set", "readinessGate.enabled=true")
        for file in RIGHTS:
            for document in yaml.safe_load_all((CHART / "files" / file).read_text()):
                rendered = one(objects, document["kind"], document["metadata"]["name"])
                for part in ("rules", "roleRef", "subjects", "spec"):
                    self.assertEqual(rendered.get(part), document.get(part), document["metadata"])
                labels = document["metadata"].get("labels", {})
                self.assertLessEqual(labels.items(), rendered["metadata"]["labels"].items())

    def test_rights_in_namespaces_are_bound_in_those_that_are_watched(self):
        own = {"kind": "ServiceAccount", "name": "weightrefit-operator", "namespace": NAMESPACE}
        everywhere = {"weightrefit:operator-cluster"}
        for file, watched in (("default", []), ("manual", ["rl"]), ("namespaces", ["rl", "serve"])):
            objects = render(CHART, "--values", CHART / f"ci/{file}-values.yaml")
            names = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in objects]
            self.assertEqual(len(names), len(set(names)), file)
            bound = {"weightrefit:operator"} | ({"weightrefit:readiness"} if file == "namespaces" else set())
            bindings = [thing for thing in objects if thing["kind"].endswith("RoleBinding") and own in thing["subjects"]]
            of_cluster = {thing["metadata"]["name"] for thing in bindings if thing["kind"] == "ClusterRoleBinding"}
            self.assertEqual(of_cluster, everywhere | (set() if watched else bound), file)
            of_some = {
                (thing["metadata"]["name"], thing["metadata"]["namespace"])
                for thing in bindings
                if thing["kind"] == "RoleBinding" and thing["roleRef"]["kind"] == "ClusterRole"
            }
            self.assertEqual(of_some, {(name, namespace) for name in bound for namespace in watched}, file)
            arguments = one(objects, "Deployment")["spec"]["template"]["spec"]["containers"][0]["args"]
            flags = [argument for argument in arguments if argument.startswith("--watch-namespace")]
            self.assertEqual(flags, [f"--watch-namespace={namespace}" for namespace in watched])
            # Nothing that the cluster has is bound in namespaces alone, where it would be worth nothing.
            rules = one(objects, "ClusterRole", "weightrefit:operator")["rules"]
            groups = {group for rule in rules for group in rule["apiGroups"]}
            self.assertFalse(groups & {"authentication.k8s.io", "authorization.k8s.io", "apiextensions.k8s.io"})
        # The operator's own namespace may be one of them.
        objects = render(CHART, "--set", f"watchNamespaces={{{NAMESPACE}}}")
        bound = [o["metadata"]["name"] for o in objects if o["kind"] == "RoleBinding"]
        self.assertEqual(sorted(bound), ["weightrefit:operator", "weightrefit:operator-own"])
        objects = render(CHART, "--values", CHART / "ci/namespaces-values.yaml")
        (webhook,) = one(objects, "MutatingWebhookConfiguration")["webhooks"]
        expressions = webhook["namespaceSelector"]["matchExpressions"]
        self.assertEqual([e["values"] for e in expressions if e["operator"] == "In"], [["rl", "serve"]])
        self.assertEqual(one(objects, "PodMonitor")["spec"]["namespaceSelector"], {"matchNames": ["rl", "serve"]})

    def test_nobody_may_write_pods_unless_their_gates_are_wanted(self):
        for objects, wanted in ((render(CHART), False), (render(CHART, "--set", "readinessGate.enabled=true"), True)):
            names = {thing["metadata"]["name"] for thing in objects if "readiness" in thing["metadata"]["name"]}
            self.assertEqual(names, {"weightrefit:readiness", "weightrefit-readiness"} if wanted else set())

    def test_each_rule_of_rights_says_why(self):
        for file in RIGHTS:
            above = ""
            for line in (CHART / "files" / file).read_text().splitlines():
                if line.startswith("- apiGroups") and not above.startswith("  verbs:"):
                    self.assertTrue(above.startswith("# "), f"{file}: {line} has no reason above it")
                above = line

    def test_the_test_of_the_release_asks_the_doctor_about_it(self):
        objects = render(CHART)
        pod = one(objects, "Pod", "weightrefit-doctor")
        self.assertIn(f"--operator-namespace={NAMESPACE}", pod["spec"]["containers"][0]["args"])
        binding = one(objects, "ClusterRoleBinding", "weightrefit-doctor")
        self.assertEqual(binding["subjects"][0]["name"], pod["spec"]["serviceAccountName"])
        one(objects, "ClusterRole", binding["roleRef"]["name"])
        for kind in ("Pod", "ClusterRoleBinding"):
            self.assertEqual(one(objects, kind, "weightrefit-doctor")["metadata"]["annotations"]["helm.sh/hook"], "test")

    def test_the_definition_is_that_of_the_binary_and_stays(self):
        definition = yaml.safe_load((ROOT / "crds/weightrefits.weightrefit.dev.yaml").read_text())
        (rendered,) = render(CRDS)
        annotations = rendered["metadata"].pop("annotations")
        self.assertEqual(annotations, {"helm.sh/resource-policy": "keep"})
        self.assertEqual(rendered, definition)
        (rendered,) = render(CRDS, "--set", "keep=false")
        self.assertEqual(rendered, definition)


class Rendered(unittest.TestCase):
    def test_objects_are_what_the_api_server_takes(self):
        folder = pathlib.Path(program("tests/kubeconform/build"))
        with tempfile.TemporaryDirectory() as own:
            definitions = [ROOT / "crds/weightrefits.weightrefit.dev.yaml", *(folder / "definitions").iterdir()]
            for definition in definitions:
                for file, schema in schemas.of_definition(yaml.safe_load(definition.read_text())):
                    pathlib.Path(own, file).write_text(json.dumps(schema))
            name = "{{ .ResourceKind }}-{{ .Group }}-{{ .ResourceAPIVersion }}.json"
            places = [f"-schema-location={place}/{name}" for place in (folder / "schemas", own)]

            def check(documents):
                command = [folder / "kubeconform", "-strict", "-summary", *places]
                return subprocess.run(command, input=documents, capture_output=True, text=True)

            for file in values():
                with self.subTest(file.name):
                    done = check(text(CHART, "--values", file))
                    self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                    self.assertIn("Skipped: 0", done.stdout)
            for file in sorted((ROOT / "tests/injection").glob("*.yaml")):
                for pod in list(yaml.safe_load_all(file.read_text()))[1:]:
                    done = check(json.dumps({"apiVersion": "v1", "kind": "Pod", **pod}))
                    self.assertEqual(done.returncode, 0, f"{file.name}: {done.stdout}{done.stderr}")
                    self.assertIn("Skipped: 0", done.stdout)
            for example in ("tests/status/refit.yaml", "examples/minilm.yaml"):
                done = check((ROOT / example).read_text())
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            done = check(text(CRDS))
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            for wrong in (
                "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: a}\ndta: {}\n",
                "apiVersion: monitoring.coreos.com/v1\nkind: PodMonitor\nmetadata: {name: a}\n"
                "spec: {selector: {}, podMetricsEndpoint: []}\n",
                "apiVersion: weightrefit.dev/v1alpha1\nkind: WeightRefit\nmetadata: {name: a}\nspec: {modl: {}}\n",
            ):
                self.assertNotEqual(check(wrong).returncode, 0, wrong)

    def test_what_is_rendered_is_what_was_recorded(self):
        for name in ("default", "high-availability"):
            objects = render(CHART, "--values", CHART / f"ci/{name}-values.yaml")
            for thing in objects:
                if thing["metadata"]["name"] in LONG:
                    thing["data"] = sorted(thing["data"])
            shown = yaml.safe_dump_all(objects, sort_keys=False, width=120)
            file = SNAPSHOTS / f"{name}.yaml"
            if os.environ.get("REWRITE"):
                file.parent.mkdir(exist_ok=True)
                file.write_text(shown)
            self.assertEqual(shown, file.read_text(), f"{file.name} differs: REWRITE=1 tests/run charts")

    def test_the_page_of_each_chart_is_fresh(self):
        for chart in (CHART, CRDS):
            page = subprocess.run([ROOT / "charts/readme", chart], check=True, stdout=subprocess.PIPE, text=True).stdout
            self.assertEqual(page, (chart / "README.md").read_text(), f"charts/readme {chart} > {chart}/README.md")

    def test_the_schema_knows_every_value_and_no_other(self):
        for chart in (CHART, CRDS):
            schema = json.loads((chart / "values.schema.json").read_text())
            self.compare(yaml.safe_load((chart / "values.yaml").read_text()), schema, chart.name)

    def compare(self, known, schema, path):
        if schema.get("additionalProperties") is not False:
            return
        keys = set(schema["properties"]) - ({"global"} if "." not in path else set())
        self.assertEqual(set(known), keys, path)
        for key, value in known.items():
            if isinstance(value, dict):
                self.compare(value, schema["properties"][key], f"{path}.{key}")


class Alerts(unittest.TestCase):
    def test_each_alert_can_be_changed_and_has_a_runbook(self):
        alerts = {rule["alert"]: rule for rule in rules()["groups"][0]["rules"] if "alert" in rule}
        self.assertEqual({path.stem for path in (CHART / "files/runbooks").glob("*.md")}, set(alerts))
        changed = "metrics.prometheusRule.rules.WeightRefitStale"
        settings = [f"{changed}.threshold=1800", f"{changed}.for=10m", f"{changed}.severity=page"]
        settings += ["metrics.prometheusRule.rules.WeightRefitSlow.enabled=false"]
        settings += ["metrics.prometheusRule.runbookUrl=https://runbooks.example/"]
        found = rules("--set", ",".join(settings))["groups"][0]["rules"]
        others = {rule["alert"]: rule for rule in found if "alert" in rule}
        self.assertEqual(set(alerts) - set(others), {"WeightRefitSlow"})
        stale = others["WeightRefitStale"]
        self.assertIn("> 1800", stale["expr"])
        self.assertEqual((stale["for"], stale["labels"]["severity"]), ("10m", "page"))
        self.assertEqual(stale["annotations"]["runbook_url"], "https://runbooks.example/WeightRefitStale.md")
        for name, rule in alerts.items():
            self.assertNotIn("runbook_url", rule["annotations"])
            self.assertIn(f"{name}\\.md", rule["annotations"]["runbook"])
            self.assertNotIn("THRESHOLD", rule["expr"])

    def test_a_change_of_an_alert_that_is_not_there_is_refused(self):
        wrong = "metrics.prometheusRule.enabled=true,metrics.prometheusRule.rules.WeightRefitTired.enabled=false"
        code, _, err = helm("template", "wr", CHART, "--set", wrong)
        self.assertNotEqual(code, 0)
        self.assertIn("there is no such alert", err)


if __name__ == "__main__":
    unittest.main()
