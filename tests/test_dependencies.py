"""House rules on the graph of crates: licences, bans and sources of deny.toml, and who may depend on whom.

Each rule is a function from the metadata to its findings; `RulesCanFail` shows each of them a graph that breaks it.
"""

import copy
import functools
import json
import pathlib
import re
import subprocess
import tomllib
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
DENY = tomllib.loads((ROOT / "deny.toml").read_text())

# What core may be built from: pure crates, whatever their own dependencies do.
CORE_MAY_USE = {"regex", "serde", "serde-saphyr", "serde_json", "sha2", "strsim", "thiserror", "wide"}
CORE_NEVER_REACHES = {"hyper", "kube", "mio", "rand", "rustix", "socket2", "tokio", "tonic"}
# Crate -> the crates that it must not name, in any kind of dependency.
DIRECTIONS = {
    "weightrefit": {"weightrefit-agent", "weightrefit-library", "weightrefit-fakegpu", "libloading"},
    "weightrefit-agent": {"weightrefit", "weightrefit-library", "weightrefit-fakegpu", "kube", "k8s-openapi"},
    "weightrefit-library": {"weightrefit", "weightrefit-fakegpu", "kube"},
    "weightrefit-fakegpu": {"weightrefit", "kube"},
    "weightrefit-proto": {"weightrefit", "weightrefit-agent", "kube"},
    "weightrefit-core": {"weightrefit", "weightrefit-agent", "weightrefit-proto"},
}


@functools.cache
def real_metadata():
    host = re.search(r"^host: (.+)$", subprocess.check_output(["rustc", "-vV"], text=True), re.M)[1]
    command = ["cargo", "metadata", "--locked", "--format-version", "1", "--filter-platform", host]
    return json.loads(subprocess.check_output(command, cwd=ROOT))


def built(metadata):
    """The packages that this platform builds."""
    nodes = {node["id"] for node in metadata["resolve"]["nodes"]}
    return [package for package in metadata["packages"] if package["id"] in nodes]


def members(metadata):
    return [package for package in metadata["packages"] if package["id"] in metadata["workspace_members"]]


def label(package):
    return f"{package['name']}@{package['version']}"


def meets(expression, allowed):
    """Whether an SPDX expression can be met: OR needs one side, AND both, AND binds tighter. `/` is the old OR."""
    tokens = re.findall(r"\(|\)|[\w.+-]+", expression.replace("/", " OR "))
    position = 0

    def token():
        return tokens[position] if position < len(tokens) else None

    def advance():
        nonlocal position
        position += 1
        return tokens[position - 1]

    def alternatives():
        value = both()
        while token() == "OR":
            advance()
            value = both() or value
        return value

    def both():
        value = one()
        while token() == "AND":
            advance()
            value = one() and value
        return value

    def one():
        name = advance()
        if name == "(":
            value = alternatives()
            if advance() != ")":
                raise ValueError(f"unbalanced licence expression `{expression}`")
            return value
        if token() == "WITH":
            advance()
            name = f"{name} WITH {advance()}"
        return name in allowed

    value = alternatives()
    if token() is not None:
        raise ValueError(f"malformed licence expression `{expression}`")
    return value


def licence_findings(metadata):
    allowed = set(DENY["licenses"]["allow"])
    for package in built(metadata):
        if not package["license"] or not meets(package["license"], allowed):
            yield f"{label(package)} has licence `{package['license']}`, which is not in deny.toml"


def ban_findings(metadata):
    by_id = {package["id"]: package["name"] for package in metadata["packages"]}
    users = {}
    for node in metadata["resolve"]["nodes"]:
        for dependency in node["dependencies"]:
            users.setdefault(by_id[dependency], set()).add(by_id[node["id"]])
    names = {package["name"] for package in built(metadata)}
    for ban in DENY["bans"]["deny"]:
        others = users.get(ban["crate"], set()) - set(ban.get("wrappers", []))
        if ban["crate"] in names and others:
            yield f"{ban['crate']} is banned ({ban['reason']}), but used by {', '.join(sorted(others))}"


def duplicate_findings(metadata):
    skipped = {entry["crate"] for entry in DENY["bans"]["skip"]}
    packages = {label(package): package["name"] for package in built(metadata)}
    for name in sorted(set(packages.values())):
        kept = [key for key, value in packages.items() if value == name and key not in skipped]
        if len(kept) > 1:
            yield f"{' and '.join(sorted(kept))} are both built; deny.toml may skip one with a reason"
    for entry in sorted(skipped - packages.keys()):
        yield f"{entry} is skipped in deny.toml, but is not built any more"


def source_findings(metadata):
    sources = {package["source"] for package in built(metadata) if package["source"]}
    for source in sources:
        if not source.startswith("registry+"):
            yield f"{source} is not a registry"
    if len(sources) > 1:
        yield f"crates come from {len(sources)} sources, only one is allowed"
    for package in built(metadata):
        if package["source"] is None and package["id"] not in metadata["workspace_members"]:
            yield f"{label(package)} is a path outside the workspace"


def direction_findings(metadata):
    for package in members(metadata):
        named = {dependency["name"] for dependency in package["dependencies"]}
        for wrong in sorted(named & DIRECTIONS.get(package["name"], set())):
            yield f"{package['name']} must not depend on {wrong}"


def purity_findings(metadata):
    (core,) = [package for package in members(metadata) if package["name"] == "weightrefit-core"]
    direct = {d["name"] for d in core["dependencies"] if d["kind"] is None}
    for name in sorted(direct - CORE_MAY_USE):
        yield f"core must not depend on {name}"
    by_id = {package["id"]: package["name"] for package in metadata["packages"]}
    normal = {
        node["id"]: [d["pkg"] for d in node["deps"] if any(kind["kind"] is None for kind in d["dep_kinds"])]
        for node in metadata["resolve"]["nodes"]
    }
    reached, open_ids = set(), [core["id"]]
    while open_ids:
        found = open_ids.pop()
        if found not in reached:
            reached.add(found)
            open_ids += normal[found]
    for name in sorted({by_id[found] for found in reached} & CORE_NEVER_REACHES):
        yield f"core reaches {name} through its dependencies"


def page_findings(metadata, page):
    """docs/dependencies.md has one line for each crate that a member names."""
    ours = {package["name"] for package in members(metadata)}
    named = {d["name"] for package in members(metadata) for d in package["dependencies"]} - ours
    listed = set(re.findall(r"^\| ([\w-]+) \|", page, re.M)) - {"crate"}
    for name in sorted(named - listed):
        yield f"{name} has no line in docs/dependencies.md"
    for name in sorted(listed - named):
        yield f"{name} has a line in docs/dependencies.md, but no crate names it"


def manifest_findings(manifest, name):
    if manifest.get("lints", {}).get("workspace") is not True:
        yield f"{name} does not inherit the workspace's lints"
    for key in ("version", "edition", "rust-version", "license"):
        if manifest["package"].get(key, {}) != {"workspace": True}:
            yield f"{name} does not inherit `{key}` from the workspace"


class Dependencies(unittest.TestCase):
    maxDiff = None

    def holds(self, findings):
        self.assertEqual(list(findings), [])

    def test_licences_are_allowed(self):
        self.holds(licence_findings(real_metadata()))

    def test_banned_crates_are_absent(self):
        self.holds(ban_findings(real_metadata()))

    def test_no_crate_is_built_twice_without_a_reason(self):
        self.holds(duplicate_findings(real_metadata()))

    def test_all_crates_come_from_one_registry(self):
        self.holds(source_findings(real_metadata()))

    def test_crates_depend_in_one_direction(self):
        self.holds(direction_findings(real_metadata()))

    def test_core_is_built_from_pure_crates(self):
        self.holds(purity_findings(real_metadata()))

    def test_the_dependency_page_is_complete(self):
        self.holds(page_findings(real_metadata(), (ROOT / "docs/dependencies.md").read_text()))

    def test_members_inherit_what_the_workspace_says(self):
        for package in members(real_metadata()):
            path = pathlib.Path(package["manifest_path"])
            self.holds(manifest_findings(tomllib.loads(path.read_text()), package["name"]))


class RulesCanFail(unittest.TestCase):
    def broken(self, change):
        metadata = copy.deepcopy(real_metadata())
        change(metadata)
        return metadata

    def package(self, metadata, name):
        return next(package for package in metadata["packages"] if package["name"] == name)

    def name_dependency(self, crate, dependency):
        def change(metadata):
            self.package(metadata, crate)["dependencies"].append({"name": dependency, "kind": None})

        return self.broken(change)

    def test_licence_expressions(self):
        allowed = {"MIT", "ISC", "Apache-2.0 WITH LLVM-exception"}
        rows = {
            "MIT": True,
            "GPL-3.0": False,
            "GPL-3.0 OR MIT": True,
            "GPL-3.0/MIT": True,
            "MIT AND GPL-3.0": False,
            "MIT OR GPL-3.0 AND GPL-2.0": True,
            "(MIT OR GPL-3.0) AND ISC": True,
            "(MIT OR ISC) AND GPL-3.0": False,
            "Apache-2.0 WITH LLVM-exception": True,
            "Apache-2.0": False,
        }
        for expression, met in rows.items():
            self.assertEqual(meets(expression, allowed), met, expression)

    def test_an_unknown_or_missing_licence_is_found(self):
        for licence in ("AGPL-3.0", None):
            metadata = self.broken(lambda m: self.package(m, "serde").update(license=licence))
            self.assertRegex("\n".join(licence_findings(metadata)), r"serde@")

    def test_a_banned_crate_is_found(self):
        metadata = self.broken(lambda m: self.package(m, "regex").update(name="openssl"))
        self.assertRegex("\n".join(ban_findings(metadata)), r"openssl is banned .* used by .*weightrefit-core")

    def test_a_second_version_is_found(self):
        metadata = self.broken(lambda m: self.package(m, "strsim").update(name="regex"))
        self.assertRegex("\n".join(duplicate_findings(metadata)), r"regex@\S+ and regex@")

    def test_a_stale_exception_is_found(self):
        skips = {entry["crate"].split("@")[0] for entry in DENY["bans"]["skip"]}
        gone = next(iter(skips))
        metadata = self.broken(lambda m: [p.update(version="0") for p in m["packages"] if p["name"] == gone])
        self.assertRegex("\n".join(duplicate_findings(metadata)), r"is not built any more")

    def test_another_source_is_found(self):
        for source in ("git+ssh://example/serde", "registry+https://example/index"):
            metadata = self.broken(lambda m: self.package(m, "serde").update(source=source))
            self.assertTrue(list(source_findings(metadata)), source)

    def test_a_wrong_direction_is_found(self):
        for crate, wrong in DIRECTIONS.items():
            for dependency in wrong:
                metadata = self.name_dependency(crate, dependency)
                self.assertEqual(list(direction_findings(metadata)), [f"{crate} must not depend on {dependency}"])

    def test_an_impure_dependency_of_core_is_found(self):
        found = list(purity_findings(self.name_dependency("weightrefit-core", "tokio")))
        self.assertEqual(found, ["core must not depend on tokio"])
        found = list(purity_findings(self.broken(lambda m: self.package(m, "regex-automata").update(name="mio"))))
        self.assertEqual(found, ["core reaches mio through its dependencies"])

    def test_a_missing_and_a_stale_line_of_the_page_are_found(self):
        page = (ROOT / "docs/dependencies.md").read_text().replace("| wide |", "| narrow |")
        found = {text.split()[0] for text in page_findings(real_metadata(), page)}
        self.assertLessEqual({"wide", "narrow"}, found)

    def test_a_manifest_of_its_own_mind_is_found(self):
        bare = {"package": {"version": {"workspace": True}, "license": "MIT"}}
        self.assertEqual(len(list(manifest_findings(bare, "x"))), 4)


if __name__ == "__main__":
    unittest.main()
