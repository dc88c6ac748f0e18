"""A real daemon for the tests: KVTIER_BIN, or built here with `go build`."""

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import threading
import time

import pytest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE.parent))

import kvtier  # noqa: E402

PATIENCE = 20.0  # seconds that bound every wait


def wait_for(what, ok):
    """Waits until ok() is true."""
    end = time.monotonic() + PATIENCE
    while True:
        got = ok()
        if got:
            return got
        assert time.monotonic() < end, f"it does not come: {what}"
        time.sleep(0.005)


def quickly(seconds, call, tries=20):
    """Makes a call until it takes less than so long, and returns what it returned then: a
    machine that does other things is late now and then, a call that waits every time."""
    took = []
    for _ in range(tries):
        began = time.monotonic()
        got = call()
        took.append(time.monotonic() - began)
        if took[-1] < seconds:
            return got
    raise AssertionError(f"it takes {min(took):.3f} s, want less than {seconds}")


@pytest.fixture(scope="session")
def binary(tmp_path_factory):
    """The program."""
    given = os.environ.get("KVTIER_BIN")
    if given:
        return given
    out = tmp_path_factory.mktemp("bin") / "kvtier"
    subprocess.run(
        ["go", "build", "-o", str(out), "./cmd/kvtier"], cwd=ROOT, check=True, env={**os.environ, "CGO_ENABLED": "0"}
    )
    return str(out)


class Daemon:
    """A daemon on free ports and a socket in a directory of its own."""

    def __init__(self, binary, path, shared=True, token="", dram="128MiB", nvme="256MiB", tls=None, extra=()):
        self.binary = binary
        self.path = pathlib.Path(path)
        self.socket = self.path / "s.sock"
        self.token = token
        self.env = {k: v for k, v in os.environ.items() if k != "KVTIER_TOKEN"}
        if token:
            self.env["KVTIER_TOKEN"] = token
        self.args = ["--data", str(self.path), "--dram", dram, "--socket", str(self.socket)]
        self.args += ["--shared-memory", "on" if shared else "off", "--drain-timeout", "5s"]
        self.args += ["--nvme", f"{self.path}/g3.slab={nvme}" if nvme else "none"]
        if tls:
            self.args += ["--tls-cert", str(tls[0]), "--tls-key", str(tls[1])]
        self.args += list(extra)
        self.tls = tls
        # Of the second address nobody else is given the port while the daemon is away.
        self.host = "127.0.0.1" if tls else "127.0.0.2"
        self.xfer_port = 0
        self.process = None
        self.start()

    def start(self):
        """Starts it, on the port that it had before."""
        log = open(self.path / "log", "ab")
        self.process = subprocess.Popen(
            [self.binary, "serve", *self.args, "--listen", "127.0.0.1:0", "--xfer", self.tcp],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=self.env,
        )
        log.close()
        line = self.process.stdout.readline()
        assert line.startswith("ready "), (self.path / "log").read_text()
        self.grpc = line.split()[1]
        if not self.xfer_port:
            self.xfer_port = wait_for("the port of sessions", self._port)

    def _port(self):
        for row in (self.path / "log").read_text().splitlines():
            if "sessions listen" in row and "network=tcp" in row:
                return int(row.split("address=")[1].split()[0].rsplit(":", 1)[1])
        return 0

    @property
    def unix(self):
        return f"unix:{self.socket}"

    @property
    def tcp(self):
        return f"{self.host}:{self.xfer_port}"

    def kill(self):
        """As a crash does."""
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def stop(self):
        """In order."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self.process.stdout.close()

    def command(self, *args):
        """Runs a command of the program, and returns its JSON."""
        out = subprocess.run(
            [
                self.binary,
                *args,
                "--json",
                "--server",
                self.grpc,
                *(["--tls-ca", str(self.tls[0])] if self.tls else []),
            ],
            check=True,
            stdout=subprocess.PIPE,
            env=self.env,
        ).stdout
        return json.loads(out)

    def stat(self):
        return self.command("stat")

    def hits(self):
        """Blocks that the store has served, of all tiers."""
        return sum(t["hits"] for t in self.stat()["tiers"])

    def held(self):
        """Leases and places for puts."""
        stat = self.stat()
        return stat["leases"], stat["reservations"]


@pytest.fixture
def daemons(binary, tmp_path_factory):
    """Makes daemons that end with the test."""
    made = []

    def make(**kw):
        path = tmp_path_factory.mktemp("d")
        made.append(Daemon(binary, path, **kw))
        return made[-1]

    yield make
    for d in made:
        d.stop()
        shutil.rmtree(d.path, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_daemon(binary, tmp_path_factory):
    """One daemon for the tests that leave it as it is."""
    d = Daemon(binary, tmp_path_factory.mktemp("shared"), dram="512MiB", nvme="512MiB")
    yield d
    d.stop()


WAYS = ["shared", "unix", "tcp"]


def attach(daemon, way, **kw):
    """A pool that moves bytes in one of the ways."""
    address = daemon.tcp if way == "tcp" else daemon.unix
    pool = kvtier.connect(address, token=daemon.token or None, shared=way == "shared", required=True, **kw)
    assert pool.shared == (way == "shared")
    return pool


@pytest.fixture(params=WAYS)
def pool(request, shared_daemon):
    with attach(shared_daemon, request.param) as p:
        yield p


_names = iter(range(1 << 30))


def fresh_name():
    return f"ns-{os.getpid()}-{next(_names)}"


@pytest.fixture
def ns(pool):
    """A namespace of blocks of up to 4 MiB."""
    return pool.open(fresh_name(), model="m", dtype="bf16", max_block_bytes=4 << 20)


def hashes(n, seed=0, length=16):
    return [seed.to_bytes(4, "big") + i.to_bytes(length - 4, "big") for i in range(1, n + 1)]


def pattern(n, seed=0):
    """Bytes of which no two blocks have the same."""
    step = (b"%08x" % (seed & 0xFFFFFFFF)) * 512
    out = bytearray((step * (n // len(step) + 1))[:n])
    for at in range(0, n - 8, 4096):
        out[at : at + 8] = (seed * 1000003 + at).to_bytes(8, "big", signed=False)
    return bytes(out)


@pytest.fixture(autouse=True)
def no_thread_left():
    """A closed pool leaves no thread behind."""
    before = set(threading.enumerate())
    yield
    wait_for(
        "the end of the pool's threads",
        lambda: (
            not [t for t in threading.enumerate() if t not in before and t.name.startswith("kvtier") and t.is_alive()]
            or any(not p._closed for p in kvtier._pool._pools)
        ),
    )
