"""Images: what `images/pack` makes, what `images/sbom` lists, and that the Containerfile makes the same."""

import hashlib
import io
import json
import os
import pathlib
import re
import subprocess
import tarfile
import tempfile
import tomllib
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINARIES = pathlib.Path(os.environ["WEIGHTREFIT_BIN"])


def pack(folder, program, *more):
    out = pathlib.Path(folder, "image.tar")
    subprocess.run([ROOT / "images/pack", out, "weightrefit.test/image:1", program, *more], check=True)
    return out


def sbom(package):
    run = subprocess.run([ROOT / "images/sbom", package], check=True, stdout=subprocess.PIPE)
    return json.loads(run.stdout)


def read(archive):
    """Name -> content; manifest; config; the layer."""
    with tarfile.open(archive) as tar:
        files = {entry.name: tar.extractfile(entry).read() for entry in tar}
    index = json.loads(files["index.json"])
    blob = lambda described: files["blobs/" + described["digest"].replace(":", "/")]
    manifest = json.loads(blob(index["manifests"][0]))
    return files, manifest, json.loads(blob(manifest["config"])), blob(manifest["layers"][0])


class Pack(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.TemporaryDirectory()
        self.addCleanup(self.folder.cleanup)

    def test_blobs_are_what_their_names_say_and_the_same_each_time(self):
        archive = pack(self.folder.name, BINARIES / "weightrefit")
        first = archive.read_bytes()
        files, manifest, config, layer = read(archive)
        for name, content in files.items():
            if name.startswith("blobs/"):
                self.assertEqual(name, f"blobs/sha256/{hashlib.sha256(content).hexdigest()}")
        self.assertEqual(manifest["layers"][0]["size"], len(layer))
        self.assertEqual(config["rootfs"]["diff_ids"], [manifest["layers"][0]["digest"]])
        self.assertEqual(pack(self.folder.name, BINARIES / "weightrefit").read_bytes(), first)

    def test_each_program_runs_on_its_image_alone(self):
        chroot = ["chroot"] if os.geteuid() == 0 else ["unshare", "--map-root-user", "chroot"]
        if subprocess.run([*chroot, "/", "true"], capture_output=True).returncode:
            self.skipTest("this user may not chroot")
        for name in ("weightrefit", "weightrefit-agent", "weightrefit-operator"):
            with self.subTest(name), tempfile.TemporaryDirectory() as root:
                _, _, config, layer = read(pack(self.folder.name, BINARIES / name))
                with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
                    tar.extractall(root, filter="fully_trusted")
                run = subprocess.run(
                    [*chroot, root, *config["config"]["Entrypoint"], "--version"], capture_output=True, text=True
                )
                self.assertEqual((run.returncode, run.stdout.split()[0]), (0, name), run.stderr)
                user = config["config"]["User"].split(":")[0]
                self.assertGreater(int(user), 0, "a number, as `runAsNonRoot` needs, and not root's")

    def test_an_image_carries_the_libraries_that_it_is_given(self):
        library = BINARIES / "libweightrefit.so"
        _, _, _, layer = read(pack(self.folder.name, BINARIES / "weightrefit-agent", "--library", library))
        with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
            self.assertEqual(tar.extractfile("usr/lib/weightrefit/libweightrefit.so").read(), library.read_bytes())
        agent = (ROOT / "images/Containerfile").read_text().split(" AS agent")[1]
        self.assertIn("/source/target/release/libweightrefit.so /usr/lib/weightrefit/\n", agent)

    def test_what_is_no_program_is_refused(self):
        run = subprocess.run(
            [ROOT / "images/pack", f"{self.folder.name}/x.tar", "x:1", ROOT / "Cargo.toml"], capture_output=True, text=True
        )
        self.assertEqual(run.returncode, 1)
        self.assertIn("is no program of Linux", run.stderr)
        self.assertEqual(os.listdir(self.folder.name), [])


class Sbom(unittest.TestCase):
    def test_it_lists_the_crates_that_are_linked_with_licence_and_checksum(self):
        locked = tomllib.loads((ROOT / "Cargo.lock").read_text())["package"]
        checksums = {(entry["name"], entry["version"]): entry.get("checksum") for entry in locked}
        for package in ("weightrefit", "weightrefit-agent", "weightrefit-library"):
            with self.subTest(package):
                document = sbom(package)
                listed = {(c["name"], c["version"]) for c in document["components"]}
                tree = ["cargo", "tree", "--locked", "-p", package, "-e", "normal", "--prefix", "none"]
                tree += ["--target", "x86_64-unknown-linux-gnu"]
                tree = subprocess.run(tree, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout
                linked = set(re.findall(r"(?m)^(\S+) v(\S+)", tree)) - {(package, document["metadata"]["component"]["version"])}
                # Features are those of the workspace, which may bring more than one package asks for by itself.
                self.assertLessEqual(linked, listed)
                self.assertLessEqual(listed, checksums.keys())
                for entry in document["components"]:
                    self.assertTrue(entry["licenses"][0]["expression"], entry["name"])
                    hashes = [h["content"] for h in entry.get("hashes", [])]
                    wanted = checksums[entry["name"], entry["version"]]
                    self.assertEqual(hashes, [wanted] if wanted else [], entry["name"])
                self.assertNotIn("proptest", {name for name, _ in listed}, "only tests need it")
                refs = {c["bom-ref"] for c in document["components"]} | {document["metadata"]["component"]["bom-ref"]}
                for entry in document["dependencies"]:
                    self.assertLessEqual({entry["ref"], *entry["dependsOn"]}, refs)


class Containerfile(unittest.TestCase):
    def test_it_builds_with_our_compiler_and_runs_as_pack_has_it(self):
        text = (ROOT / "images/Containerfile").read_text()
        channel = tomllib.loads((ROOT / "rust-toolchain.toml").read_text())["toolchain"]["channel"]
        self.assertEqual(set(re.findall(r"(?m)^FROM rust:([\d.]+)", text)), {channel})
        stages = re.split(r"(?m)^FROM ", text)[1:]
        images = {stage.split(" AS ")[1].split()[0]: stage for stage in stages if "ENTRYPOINT" in stage}
        with tempfile.TemporaryDirectory() as folder:
            for target, name in (("operator", "weightrefit-operator"), ("cli", "weightrefit"), ("agent", "weightrefit-agent")):
                _, _, config, _ = read(pack(folder, BINARIES / name))
                config = config["config"]
                self.assertIn(f"\nUSER {config['User']}\n", images[target])
                self.assertIn(f'\nENTRYPOINT {json.dumps(config["Entrypoint"])}\n', images[target])


if __name__ == "__main__":
    unittest.main()
