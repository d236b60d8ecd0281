"""What people do with weightrefit in a cluster, from install to uninstall."""

import functools
import json
import os
import pathlib
import signal
import time

from report import wait

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SYSTEM, DEMO = "weightrefit-system", "refit-demo"
OPERATOR = "deployment/weightrefit-operator"
ENGINES, TRAINER = ("engine-0", "engine-1"), "trainer-0"
REGISTRY = "weightrefit.test"
IMAGES = ("weightrefit", "weightrefit-agent", "weightrefit-operator")
AGENT = "weightrefit-agent"
GATE = "weightrefit.dev/WeightsCurrent"


def patch(kind, name, added):
    """A patch of the demo's object: to each path, its new value."""
    steps = [{"op": "add", "path": path, "value": value} for path, value in added.items()]
    return {"target": {"kind": kind, "name": name}, "patch": json.dumps(steps)}


def workload(name):
    return {"apiVersion": "apps/v1", "kind": "StatefulSet", "name": name}


# The demo as one runs it who wants the operator's word too, and the sizes of its workloads in the refit's status.
GATED = (
    patch("StatefulSet", "engine", {"/spec/template/spec/readinessGates": [{"conditionType": GATE}]}),
    patch(
        "WeightRefit",
        "demo",
        {
            "/spec/training/workloadRef": workload("trainer"),
            "/spec/inference/pools/0/workloadRef": workload("engine"),
        },
    ),
)


def install(cluster, *more):
    images = {"image": "weightrefit-operator", "agent.image": AGENT, "cli.image": "weightrefit"}
    images = [f"--set={value}.repository={REGISTRY}/{image}" for value, image in images.items()]
    cluster.helm("upgrade", "--install", "weightrefit", ROOT / "charts/weightrefit", f"--namespace={SYSTEM}", *images, *more)


def overlay(cluster, name, **more):
    """A folder for `kubectl apply -k`: the demo with the images of this cluster."""
    folder = cluster.state / name
    folder.mkdir(exist_ok=True)
    images = [{"name": image, "newName": f"{REGISTRY}/{image}"} for image in IMAGES]
    base = os.path.relpath(ROOT / "examples/cluster-demo", folder)
    (folder / "kustomization.yaml").write_text(json.dumps({"resources": [base], "images": images} | more))
    return folder


class Demo:
    """The demo in the cluster, as one looks at it."""

    def __init__(self, cluster):
        self.cluster = cluster

    def pod(self, name):
        return self.cluster.get("pod", name, f"--namespace={DEMO}")

    def refit(self):
        return self.cluster.get("weightrefit", "demo", f"--namespace={DEMO}")

    def condition(self, kind):
        conditions = self.refit().get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {"status": "Unknown", "reason": ""})

    def is_ready(self, name):
        conditions = self.pod(name)["status"].get("conditions", [])
        return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)

    def log(self, pod, container, *more):
        return self.cluster.kubectl("logs", pod, f"--container={container}", f"--namespace={DEMO}", *more)

    def said(self, pod, container):
        """What a reference process has told, since its container began."""
        lines = [line for line in self.log(pod, container).splitlines() if line.startswith("{")]
        return [json.loads(line) for line in lines]

    def checked(self, pod):
        """Versions that both ranks of the replica have compared with the trainer's weights, and found right."""
        versions = []
        for rank in ("rank-0", "rank-1"):
            checks = [told for told in self.said(pod, rank) if told["type"] == "checked"]
            for check in checks:
                wrong = check["mismatched"], check["padsNotZero"]
                assert check["checked"] > 0 and wrong == (0, 0), f"{pod} {rank} serves wrong weights: {check}"
            versions.append({(check["run"], check["step"]) for check in checks})
        return versions[0] & versions[1]

    def newest(self, pod):
        return max(self.checked(pod), default=(-1, -1))

    def goes_on(self, pods=ENGINES, rounds=2):
        """Waits until each of these replicas has got some more versions, all of them right."""
        before = {pod: self.checked(pod) for pod in pods}

        def more():
            return all(len(self.checked(pod) - before[pod]) >= rounds for pod in pods)

        wait(f"{rounds} more verified versions on {', '.join(pods)}", more)

    def agent_processes(self, pod):
        """Process ids of the pod's agent as this machine has them: supervisor, worker."""
        uid = self.pod(pod)["metadata"]["uid"]
        found = {}
        for process in pathlib.Path("/proc").glob("[0-9]*"):
            try:
                arguments = (process / "cmdline").read_bytes().split(b"\0")
                groups = (process / "cgroup").read_text()
            except OSError:
                continue  # it has ended meanwhile
            if b"--supervise" in arguments and (uid in groups or uid.replace("-", "_") in groups):
                found["worker" if b"--worker-of" in arguments else "supervisor"] = int(process.name)
        return found["supervisor"], found["worker"]

    def restarts(self, pod, container):
        status = self.pod(pod)["status"]
        every = status.get("initContainerStatuses", []) + status.get("containerStatuses", [])
        return next(c["restartCount"] for c in every if c["name"] == container)


def on_node(cluster, report):
    demo = Demo(cluster)
    report.explain = functools.partial(explain, cluster)
    with report.step("helm install: both charts, and the operator is ready", is_base=True):
        cluster.helm("install", "weightrefit-crds", ROOT / "charts/weightrefit-crds", f"--namespace={SYSTEM}", "--create-namespace")
        install(cluster, "--wait", "--timeout=180s")
    with report.step("kubectl apply -k: the demo is taken as it is", is_base=True):
        cluster.kubectl("apply", "-k", overlay(cluster, "engines-alone", replicas=[{"name": "trainer", "count": 0}]))
    with report.step("pods that name the refit get an agent from the webhook, others none", is_base=True):
        wait("engine pods", lambda: all(demo.pod(pod) for pod in ENGINES))
        for name in ENGINES:
            first = demo.pod(name)["spec"]["initContainers"][0]
            assert (first["name"], first.get("restartPolicy")) == (AGENT, "Always"), first
        operator = cluster.get("pods", f"--namespace={SYSTEM}")["items"]
        assert operator and not any(agent_of(pod) for pod in operator)
    with report.step("engines run, and none is ready before its first verified version"):
        running = "PodScheduled Initialized PodReadyToStartContainers".split()

        def started(name):
            status = demo.pod(name)["status"]
            every = status["initContainerStatuses"] + status["containerStatuses"]
            kept = [c for c in status["conditions"] if c["type"] in running and c["status"] == "True"]
            return len(kept) == len(running) and all(c.get("started") or c["state"].get("terminated") for c in every)

        wait("running engines", lambda: all(started(pod) for pod in ENGINES))
        wait("their agents in the membership's count", lambda: demo.condition("MembersResolved")["status"] == "False")
        assert not any(demo.is_ready(pod) for pod in ENGINES)
        assert not any(demo.checked(pod) for pod in ENGINES)
        ready = cluster.get("weightrefit", "demo", f"--namespace={DEMO}")["status"]["inference"]
        assert ready.get("servingReplicas", 0) == 0, ready
    with report.step("with the trainer, rounds are committed and every weight is right", is_base=True):
        cluster.kubectl("apply", "-k", overlay(cluster, "demo"))
        demo.goes_on(rounds=3)
    with report.step("then the engines' pods are ready, and the refit says so"):
        wait("ready pods", lambda: all(demo.is_ready(pod) for pod in (*ENGINES, TRAINER)))
        wait("Ready", lambda: demo.condition("Ready")["status"] == "True")
        wait("InSync", lambda: demo.condition("InSync")["status"] == "True")
        wait("committed", lambda: demo.refit()["status"]["inference"]["committed"]["step"] > 0)
        agents = [demo.restarts(pod, AGENT) for pod in (*ENGINES, TRAINER)]
        assert agents == [0, 0, 0], agents
    with report.step("helm test: the doctor finds nothing"):
        cluster.helm("test", "weightrefit", f"--namespace={SYSTEM}", "--logs")
    with report.step("what an agent costs"):
        for name, pod in (("training", TRAINER), ("inference", ENGINES[0])):
            print(f"       agent of a pod with two ranks, {name}: {cost(demo, pod)}")
    with report.step("kill -9 of an agent's worker: it begins anew in place, and its replica gets the next versions"):
        for pod in (ENGINES[0], TRAINER):
            supervisor, worker = demo.agent_processes(pod)
            os.kill(worker, signal.SIGKILL)
            wait("another worker", lambda: demo.agent_processes(pod)[1] != worker)
            assert demo.agent_processes(pod)[0] == supervisor
            demo.goes_on()
            assert demo.restarts(pod, AGENT) == 0
        wait("ready pods", lambda: all(demo.is_ready(pod) for pod in ENGINES))
    with report.step("an engine's process is killed: its container begins anew, and is ready with weights only"):
        before = demo.restarts(ENGINES[0], "rank-1")
        kill_container(demo, ENGINES[0], b"--replica-rank=1")
        wait("restarted container", lambda: demo.restarts(ENGINES[0], "rank-1") > before)
        demo.goes_on((ENGINES[1],))
        wait("checked by both ranks", lambda: demo.checked(ENGINES[0]) and demo.is_ready(ENGINES[0]))
        demo.goes_on()
    with report.step("an engine's pod is deleted: the other goes on, the new one catches up"):
        uid = demo.pod(ENGINES[1])["metadata"]["uid"]
        cluster.kubectl("delete", "pod", ENGINES[1], f"--namespace={DEMO}", "--wait=false")
        demo.goes_on((ENGINES[0],))
        wait("a new pod", lambda: demo.pod(ENGINES[1])["metadata"]["uid"] != uid and demo.is_ready(ENGINES[1]))
        demo.goes_on()
    with report.step("the operator is away: rounds go on"):
        cluster.kubectl("delete", "pods", f"--namespace={SYSTEM}", "--all", "--force", "--grace-period=0", "--wait=false")
        cluster.kubectl("scale", OPERATOR, f"--namespace={SYSTEM}", "--replicas=0")
        wait("no operator", lambda: not cluster.names("pods", f"--namespace={SYSTEM}"))
        demo.goes_on()
        cluster.kubectl("scale", OPERATOR, f"--namespace={SYSTEM}", "--replicas=2")
        cluster.kubectl("rollout", "status", OPERATOR, f"--namespace={SYSTEM}", "--timeout=180s")
        at = demo.newest(ENGINES[0])[1]
        wait("the refit's status to follow", lambda: demo.refit()["status"]["inference"]["committed"]["step"] >= at)
        assert all(demo.restarts(pod, AGENT) == 0 for pod in ENGINES)
    with report.step("the trainer's pod is deleted: the new one goes on as another run"):
        run, _ = demo.newest(ENGINES[0])
        cluster.kubectl("delete", "pod", TRAINER, f"--namespace={DEMO}")
        wait("a version of a newer run", lambda: all(demo.newest(pod)[0] > run for pod in ENGINES))
        demo.goes_on()
    with report.step("helm upgrade: rounds go on, in the same epoch"):
        epoch = demo.refit()["status"]["membership"]["epoch"]
        install(cluster, "--set=logFilter=debug", "--wait", "--timeout=180s")
        demo.goes_on()
        wait("its agents", lambda: demo.condition("Ready")["status"] == "True")
        assert demo.refit()["status"]["membership"]["epoch"] == epoch
    with report.step("engines that ask for the readiness gate are ready by it; workloads that are named tell their size"):
        install(cluster, "--set=logFilter=debug", "--set=readinessGate.enabled=true", "--wait", "--timeout=180s")
        cluster.kubectl("apply", "-k", overlay(cluster, "gated", patches=GATED))
        cluster.kubectl("rollout", "status", "statefulset/engine", f"--namespace={DEMO}", "--timeout=180s")
        for pod in ENGINES:
            conditions = {c["type"]: c["status"] for c in demo.pod(pod)["status"]["conditions"]}
            assert conditions.get(GATE) == "True" and demo.is_ready(pod), conditions
        wait("the size that the workload wants", lambda: demo.refit()["status"]["inference"].get("desiredReplicas") == 2)
        wait("InSync", lambda: demo.condition("InSync")["status"] == "True")
        demo.goes_on()
    with report.step("a workload that grows is told before its pods are there; they become ready with current weights"):
        cluster.kubectl("scale", "statefulset/engine", f"--namespace={DEMO}", "--replicas=3")
        wait("the size that it wants now", lambda: demo.refit()["status"]["inference"].get("desiredReplicas") == 3)
        cluster.kubectl("rollout", "status", "statefulset/engine", f"--namespace={DEMO}", "--timeout=180s")
        demo.goes_on((*ENGINES, "engine-2"))
        cluster.kubectl("scale", "statefulset/engine", f"--namespace={DEMO}", "--replicas=2")
        wait("a refit of two replicas", lambda: demo.refit()["status"]["inference"].get("desiredReplicas") == 2)
        demo.goes_on()
    with report.step("helm uninstall: nothing of ours is left"):
        cluster.kubectl("delete", "-k", overlay(cluster, "demo"), "--timeout=120s")
        uninstall(cluster)


def on_control_plane(cluster, report):
    report.explain = lambda: None
    with report.step("helm install: both charts", is_base=True):
        cluster.helm("install", "weightrefit-crds", ROOT / "charts/weightrefit-crds", f"--namespace={SYSTEM}", "--create-namespace")
        install(cluster)
    with report.step("kubectl apply -k: the demo is taken as it is"):
        cluster.kubectl("apply", "-k", overlay(cluster, "demo"))
        assert cluster.names("weightrefits", f"--namespace={DEMO}") == {"weightrefit.weightrefit.dev/demo"}
    with report.step("helm upgrade"):
        install(cluster, "--set=logFilter=debug")
    with report.step("helm uninstall: nothing of ours is left"):
        cluster.kubectl("delete", "-k", overlay(cluster, "demo"), "--wait=false")
        # No controller empties a namespace here.
        uninstall(cluster, but=("namespace",))
    report.skip("agents, rounds, readiness, kills, rollout", "no node runs here")


def uninstall(cluster, but=()):
    for release in ("weightrefit", "weightrefit-crds"):
        cluster.helm("uninstall", release, f"--namespace={SYSTEM}", "--wait")
    # The chart keeps the definition, and with it everybody's refits, unless it is told not to.
    definition = "customresourcedefinition.apiextensions.k8s.io/weightrefits.weightrefit.dev"
    assert definition in cluster.names("crd"), "the definition went with the release"
    cluster.kubectl("delete", definition)
    wait("nothing left", lambda: not ours(cluster, but), 60) if not but else None
    left = ours(cluster, but)
    assert not left, f"left behind: {sorted(left)}"


def ours(cluster, but=()):
    """Every object of the cluster whose name is ours, but the namespace that was made for it."""
    kinds = cluster.kubectl("api-resources", "--verbs=list", "-o", "name").split()
    # Events are of what was; they pass.
    kinds = ",".join(kind for kind in kinds if not kind.startswith(("events", *but)))
    names = "jsonpath={range .items[*]}{.kind}/{.metadata.name}{\"\\n\"}{end}"
    listed = cluster.kubectl("get", kinds, "--all-namespaces", "-o", names).split()
    assert "ClusterRole/cluster-admin" in listed, "the list has not what every cluster has"
    return {name for name in listed if "weightrefit" in name.lower()} - {f"Namespace/{SYSTEM}"}


def agent_of(pod):
    return any(container["name"] == AGENT for container in pod["spec"].get("initContainers", []))


def kill_container(demo, pod, argument):
    """SIGKILL to the process of the pod whose arguments hold this one."""
    uid = demo.pod(pod)["metadata"]["uid"]
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            is_it = argument in (process / "cmdline").read_bytes().split(b"\0")
            if is_it and uid in (process / "cgroup").read_text():
                os.kill(int(process.name), signal.SIGKILL)
                return
        except OSError:
            continue  # it has ended meanwhile
    raise AssertionError(f"no process of {pod} has argument {argument}")


def cost(demo, pod, seconds=20):
    """Memory of the agent's two processes, and processor time over some rounds."""

    def times(process):
        fields = pathlib.Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def kilobytes(process, key):
        lines = pathlib.Path(f"/proc/{process}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(key))

    supervisor, worker = demo.agent_processes(pod)
    before = times(worker) + times(supervisor)
    time.sleep(seconds)
    spent = times(worker) + times(supervisor) - before
    shown = ", ".join(
        f"{name} {kilobytes(process, 'VmRSS:') / 1024:.1f} MiB resident ({kilobytes(process, 'RssAnon:') / 1024:.1f} its own, "
        f"{kilobytes(process, 'RssShmem:') / 1024:.1f} shared)"
        for name, process in (("worker", worker), ("supervisor", supervisor))
    )
    return f"{shown}; {1000 * spent / seconds:.1f} ms of processor time a second"


def explain(cluster):
    """What a person would look at first."""
    for command in (
        ["get", "pods", "--all-namespaces", "-o", "wide"],
        ["get", "weightrefits", f"--namespace={DEMO}", "-o", "jsonpath={.items[*].status}"],
        ["get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"],
        ["logs", OPERATOR, f"--namespace={SYSTEM}", "--tail=15", "--all-pods"],
        ["logs", ENGINES[0], f"--namespace={DEMO}", f"--container={AGENT}", "--tail=15"],
        ["logs", TRAINER, f"--namespace={DEMO}", f"--container={AGENT}", "--tail=15"],
    ):
        told = cluster.run("kubectl", *command, is_checked=False).splitlines()
        print(f"    $ kubectl {' '.join(command)}")
        print("\n".join(f"    | {line[:400]}" for line in told[-25:]), flush=True)
