"""Prometheus as it scrapes a real local run, beside what a real operator said.

The operator's side is served from tests/observability/operator.prom, which a test against an API server keeps true.
"""

import contextlib
import http.server
import json
import os
import pathlib
import socket
import subprocess
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

import yaml

from tests.rendered import CHART, ROOT, prometheus, rules

BINARY = pathlib.Path(os.environ.get("WEIGHTREFIT_BIN", "target/release"), "weightrefit")
PATIENCE_S = 120  # for what takes seconds unless the machine is busy
SCRAPE_S = 1
WINDOW = f"{10 * SCRAPE_S}s"
# As the chart's PodMonitor names them; the pods of tests/local/tiny.yaml, in the order of their addresses.
REFIT = {"refit_namespace": "tests", "refit": "tiny", "namespace": "tests"}
PODS = [("training", f"trainer-{n}") for n in range(3)] + [("inference", f"engine-{n}") for n in range(2)]
# What Grafana puts in the place of its variables, the longer names first.
VARIABLES = {
    "$__rate_interval": WINDOW,
    "$refit_namespace": REFIT["refit_namespace"],
    "$refit": REFIT["refit"],
}


def boards():
    """Name -> dashboard."""
    return {path.stem: json.loads(path.read_text()) for path in sorted((CHART / "files/dashboards").iterdir())}


def filled(expression):
    for name, value in VARIABLES.items():
        expression = expression.replace(name, value)
    return expression


class Recorded(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = (ROOT / "tests/observability/operator.prom").read_bytes()
        self.send_response(200)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Scraped:
    """All of it, until the stack is closed."""

    def __init__(self, stack):
        programs = prometheus()
        folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))

        server = stack.enter_context(http.server.ThreadingHTTPServer(("127.0.0.1", 0), Recorded))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)

        port = free_port([f"127.0.0.{number + 2}" for number in range(len(PODS))])
        local = ["local", "-f", ROOT / "tests/local/tiny.yaml", "--rounds", "100000", "--metrics", str(port)]
        self.run = start(stack, [BINARY, *local], folder / "local.log")

        (folder / "prometheus.yaml").write_text(yaml.safe_dump(configuration(port, server.server_port)))
        (folder / "rules.yaml").write_text(yaml.safe_dump(rules()))
        listen = f"127.0.0.1:{free_port(['127.0.0.1'])}"
        command = [programs / "prometheus", "--config.file=prometheus.yaml", "--storage.tsdb.path=data"]
        command += [f"--web.listen-address={listen}", "--log.level=warn"]
        self.prometheus = start(stack, command, folder / "prometheus.log", folder)
        self.base = f"http://{listen}/api/v1/"
        self.settle()

    def settle(self):
        """Every target is scraped, and rounds have been committed for nearly as long as panels look back."""
        self.wait("all targets are scraped", lambda: len(self.query("up == 1")) == len(PODS) + 1)
        committed = f'weightrefit_agent_rounds_total{{outcome="Committed"}}[{WINDOW}]'
        settled = f"increase({committed}) >= 2 and count_over_time({committed}) >= {8 * SCRAPE_S}"
        self.wait("rounds are committed", lambda: self.query(settled))

    def ask(self, path, **arguments):
        url = f"{self.base}{path}?{urllib.parse.urlencode(arguments, doseq=True)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:  # it is starting
                raise
            raise AssertionError(f"{arguments}: {error.read().decode()}") from error

    def query(self, expression):
        return self.ask("query", query=expression)["result"]

    def wait(self, what, condition):
        """Until the condition holds; both programs must go on."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            for child in (self.run, self.prometheus):
                assert child.poll() is None, child.log.read_text()[-4000:]
            with contextlib.suppress(urllib.error.URLError):
                if condition():
                    return
            assert time.monotonic() < deadline, f"{what}: {self.run.log.read_text()[-2000:]}"
            time.sleep(0.2)


def start(stack, command, log, folder=None):
    out = stack.enter_context(log.open("wb"))
    child = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    child.log = log
    stack.callback(child.wait)
    stack.callback(child.terminate)
    return child


def free_port(addresses):
    """A port that is free on all addresses now."""
    for _ in range(100):
        with contextlib.ExitStack() as stack:
            first, *others = [stack.enter_context(socket.socket()) for _ in addresses]
            first.bind((addresses[0], 0))
            port = first.getsockname()[1]
            try:
                for other, address in zip(others, addresses[1:], strict=True):
                    other.bind((address, port))
            except OSError:
                continue
            return port
    raise AssertionError("no port is free")


def configuration(port, operator):
    def target(address, labels):
        return {"targets": [address], "labels": labels}

    agents = [
        target(f"127.0.0.{number}:{port}", REFIT | {"side": side, "pool": "default", "pod": pod})
        for number, (side, pod) in enumerate(PODS, 2)
    ]
    operators = [target(f"127.0.0.1:{operator}", {"namespace": "weightrefit-system", "pod": "operator-0"})]
    jobs = {"weightrefit-agent": agents, "weightrefit-operator": operators}
    return {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": ["rules.yaml"],
        "scrape_configs": [{"job_name": name, "static_configs": configs} for name, configs in jobs.items()],
    }
