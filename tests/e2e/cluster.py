"""Clusters that the scenarios run on: a real node, or where that cannot be, an API server alone."""

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
START_SECONDS_MAX = 300
# What tests/testbed/node/up calls, and where Debian has it.
NODE_TOOLS = {"ip": "iproute2", "nft": "nftables", "iptables": "iptables", "nsenter": "util-linux", "openssl": "openssl"}
NODE_TOOLS |= {"pgrep": "procps", "sysctl": "procps", "unshare": "util-linux"}


class CommandFailed(Exception):
    pass


def built(script, *arguments):
    """What a build script of the tests prints last: the path of what it has built."""
    run = subprocess.run([ROOT / script, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return pathlib.Path(run.stdout.strip())


def why_no_node():
    """Why no node can run here; None where one can."""
    if os.geteuid() != 0:
        return "a node needs root"
    missing = sorted({package for tool, package in NODE_TOOLS.items() if not shutil.which(tool)})
    if missing:
        return f"a node needs programs that are not installed: {', '.join(missing)}"
    probe = "ip link add probe0 type bridge && mount -t tmpfs tmpfs /mnt && nft list ruleset"
    run = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "sh", "-euc", probe], capture_output=True, text=True
    )
    if run.returncode:
        return f"this machine lets nobody make the namespaces of a node: {run.stderr.strip()}"
    for group in ("/sys/fs/cgroup/memory", "/sys/fs/cgroup"):
        if os.path.isdir(group):
            try:
                os.mkdir(f"{group}/weightrefit-probe")
                os.rmdir(f"{group}/weightrefit-probe")
                return None
            except OSError as error:
                return f"this machine lets nobody make control groups: {error}"
    return "this machine has no control groups"


class Cluster:
    """Common to both: how commands reach the API server."""

    def __init__(self, state, prefix, programs, helm):
        self.state, self.prefix, self.helm_program = state, prefix, helm
        path = ":".join([*map(str, programs), os.environ["PATH"]])
        self.environment = dict(os.environ, PATH=path, KUBECONFIG=str(state / "kubeconfig"), KUBERC="off")
        for tool in ("KUBECACHEDIR", "HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"):
            self.environment[tool] = str(state / tool.lower())

    def run(self, *command, stdin="", is_checked=True):
        """Standard output of the command."""
        run = subprocess.run(
            [*self.prefix, *map(str, command)], env=self.environment, input=stdin, capture_output=True, text=True, timeout=900
        )
        if is_checked and run.returncode:
            raise CommandFailed(f"{' '.join(map(str, command))}: {run.stderr.strip() or run.stdout.strip()}")
        return run.stdout

    def kubectl(self, *arguments, **more):
        return self.run("kubectl", *arguments, **more)

    def helm(self, *arguments):
        return self.run(self.helm_program, *arguments)

    def get(self, *arguments):
        return json.loads(self.kubectl("get", "-o", "json", *arguments))

    def names(self, kind, *arguments):
        return set(self.kubectl("get", kind, "-o", "name", *arguments).split())


@contextlib.contextmanager
def started(command, state, is_up):
    """Runs `command` while the context lasts, from the moment that `is_up`; it ends with its standard input."""
    with (state / "start.log").open("w") as log:
        child = subprocess.Popen([*map(str, command)], stdin=subprocess.PIPE, stdout=log, stderr=log, process_group=0)
    try:
        deadline = time.monotonic() + START_SECONDS_MAX
        while not is_up():
            if child.poll() is not None or time.monotonic() > deadline:
                raise CommandFailed(f"the cluster did not start: {last_words(state)}")
            time.sleep(0.1)
        yield
    finally:
        child.stdin.close()
        try:
            child.wait(30)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()


def last_words(state):
    """Ends of all logs of the cluster's programs."""
    logs = [state / "start.log", state / "up.log", *sorted(state.glob("log/*.log"))]
    tail = lambda log: "\n".join(line[:300] for line in log.read_text(errors="replace").splitlines()[-8:])
    return "\n".join(f"--- {log.name}\n{tail(log)}" for log in logs if log.exists())


@contextlib.contextmanager
def node(images, helm):
    """One node with these images (path of archive)."""
    programs, own = built("tests/testbed/build"), built("tests/testbed/node/build")
    with tempfile.TemporaryDirectory(prefix="weightrefit-node-", ignore_cleanup_errors=True) as folder:
        state = pathlib.Path(folder)
        (state / "images").mkdir()
        images(state / "images", own / "pause")
        up = [ROOT / "tests/testbed/node/up", programs, own, state]
        with started(up, state, (state / "ready").exists):
            init = (state / "init.pid").read_text().strip()
            # Host names and time are the machine's own; the rest is the node's.
            prefix = ["nsenter", "--target", init, "--net", "--mount", "--pid", f"--root=/proc/{init}/root", f"--wd={ROOT}"]
            yield Cluster(state, prefix, [own, programs], helm)


@contextlib.contextmanager
def control_plane(helm):
    """An API server, with nobody who makes pods or runs them."""
    programs = built("tests/testbed/build")
    with tempfile.TemporaryDirectory(prefix="weightrefit-e2e-") as folder:
        state = pathlib.Path(folder) / "state"  # which `up` removes
        state.mkdir()
        cluster = Cluster(state, [], [programs], helm)
        ports = [free_port(), free_port()]
        write_identities(cluster, ports[1])

        def is_up():
            return cluster.kubectl("get", "--raw=/readyz", is_checked=False) == "ok"

        with started([ROOT / "tests/testbed/up", programs, state, *ports], state, is_up):
            yield cluster


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def write_identities(cluster, port):
    """What tests/testbed/up finds in its folder, and an administrator's kubeconfig."""
    state, token = cluster.state, os.urandom(16).hex()
    openssl = lambda *arguments: cluster.run("openssl", *arguments)
    new = ["-newkey", "rsa:2048", "-nodes", "-x509", "-days", "1", "-subj", "/CN=api", "-addext", "subjectAltName=IP:127.0.0.1"]
    openssl("req", *new, "-keyout", state / "server.key", "-out", state / "server.crt")
    openssl("genrsa", "-out", state / "accounts.key", "2048")
    openssl("rsa", "-in", state / "accounts.key", "-pubout", "-out", state / "accounts.pub")
    (state / "tokens.csv").write_text(f"{token},admin,admin,system:masters\n")
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "bed",
        "clusters": [
            {"name": "bed", "cluster": {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(state / "server.crt")}}
        ],
        "users": [{"name": "admin", "user": {"token": token}}],
        "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": "admin"}}],
    }
    (state / "kubeconfig").write_text(json.dumps(config))
