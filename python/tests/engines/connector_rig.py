"""A daemon and engines of these tests, as processes."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

HERE = pathlib.Path(__file__).parent
PACKAGE = HERE.parent.parent
#: Where a process of the tests finds the package and the tests' own modules.
PATHS = {"PYTHONPATH": os.pathsep.join([str(PACKAGE), str(HERE)])}
#: Seconds after which an engine hangs; a start takes 20 on an idle machine, and minutes on a busy one.
PATIENCE = 400.0
#: What the prompts of tests are made from.
SEEDS = range(1, 13)
#: What engines run with.
ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "PYTHONHASHSEED": "0",
}
#: Where daemons serve. Of this address no engine is given the port while its daemon is away.
HOST = "127.0.0.2"


def binary() -> str:
    """The program kvtier: KVTIER_BIN, or built once from this checkout."""
    if path := os.environ.get("KVTIER_BIN"):
        return path
    path = os.path.join(tempfile.gettempdir(), f"kvtier-test-{os.getuid()}", "kvtier")
    subprocess.run(["go", "build", "-o", path, "./cmd/kvtier"], cwd=PACKAGE.parent, check=True)
    return path


class Daemon:
    """kvtier serve on one data directory; it can be stopped, killed and started again at the same addresses."""

    def __init__(self, directory: pathlib.Path, dram: str = "64MiB", nvme: str = "256MiB") -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        # Paths of sockets have 108 bytes; directories of tests are longer.
        self._short = tempfile.TemporaryDirectory(prefix="kvt")
        self.socket = f"{self._short.name}/s"
        self.admin = f"unix:{self._short.name}/g"
        self.slab = directory / "slab"
        self.port = _free_port()
        self.tcp = f"{HOST}:{self.port}"
        self._arguments = [
            "--data",
            str(directory / "data"),
            "--dram",
            dram,
            "--nvme",
            f"{self.slab}={nvme}",
            "--socket",
            self.socket,
            "--listen",
            self.admin,
            "--xfer",
            self.tcp,
        ]
        self._process: subprocess.Popen[str] | None = None

    @property
    def address(self) -> str:
        return f"unix:{self.socket}"

    def start(self) -> None:
        with (self.directory / "serve.log").open("a") as log:
            self._process = subprocess.Popen(
                [binary(), "serve", *self._arguments], stdout=subprocess.PIPE, stderr=log, text=True
            )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready "):
            raise AssertionError(f"kvtier serve: {(self.directory / 'serve.log').read_text()[-2000:]}")

    def stop(self, how: int = signal.SIGTERM) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        code = process.wait(60)
        if how == signal.SIGTERM and code != 0:
            raise AssertionError(
                f"kvtier serve ended with {code}: {(self.directory / 'serve.log').read_text()[-2000:]}"
            )

    def close(self) -> None:
        self.stop(signal.SIGKILL)
        self._short.cleanup()

    def call(self, *arguments: str) -> Any:
        """What a command of the program says, as JSON."""
        ran = subprocess.run(
            [binary(), *arguments, "--json", "--server", self.admin], capture_output=True, text=True, timeout=60
        )
        if ran.returncode not in (0, 3):
            raise AssertionError(f"kvtier {arguments}: {ran.stderr}")
        return json.loads(ran.stdout)

    def hits(self, *tiers: str) -> int:
        """Blocks that were served since the daemon started, from these tiers or any: the server's own count."""
        return sum(tier["hits"] for tier in self.call("stat")["tiers"] if not tiers or tier["tier"] in tiers)

    def blocks(self) -> int:
        """Blocks that are there."""
        return self.call("stat")["blocks"]

    def memory(self) -> int:
        """Bytes of memory that the process has of its own."""
        assert self._process is not None
        return own_memory(self._process.pid)

    def lines(self, *arguments: str) -> list[Any]:
        """What a command says in lines of JSON."""
        ran = subprocess.run(
            [binary(), *arguments, "--json", "--server", self.admin],
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        return [json.loads(line) for line in ran.stdout.splitlines()]


def own_memory(pid: int) -> int:
    """Bytes of a process's anonymous memory."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


class Proxy:
    """Stands between a client and the daemon's TCP address, and does something when so many bytes have come."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.spoils = False  # changes a bit in what comes from the daemon
        self._left = 0
        self._then: Callable[[], None] | None = None
        threading.Thread(target=self._accept, daemon=True).start()

    def after(self, count: int, then: Callable[[], None]) -> None:
        """Calls then when count bytes have gone to the client, and cuts the connection: what is sent but not
        delivered would come otherwise, whatever becomes of the daemon."""
        self._left, self._then = count, then

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection((HOST, self._to))
            except OSError:
                client.close()
                continue
            threading.Thread(target=self._copy, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._copy, args=(server, client, True), daemon=True).start()

    def _copy(self, source: socket.socket, to: socket.socket, counted: bool) -> None:
        try:
            while data := source.recv(16384):
                if counted and (then := self._then) is not None:
                    self._left -= len(data)
                    if self._left <= 0:
                        self._then = None
                        then()
                        break
                if counted and self.spoils and len(data) > 4096:  # so much at once is a block's
                    spoiled = bytearray(data)
                    spoiled[len(data) // 2] ^= 1
                    data = bytes(spoiled)
                to.sendall(data)
        except OSError:
            pass
        for end in (source, to):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return listener.getsockname()[1]


class Engine:
    """Real engines, one after the other in a process of its own (connector_engine.py): to import the packages takes
    longer than an engine takes to start."""

    def __init__(self, log: pathlib.Path) -> None:
        environment = os.environ | PATHS | ENVIRONMENT
        self._log = log
        self._began = 0
        with log.open("a") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / "connector_engine.py")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env=environment,
            )
        self._answers: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._starting = False

    def start(
        self, model: pathlib.Path, kv: dict[str, Any] | None = None, env: dict[str, str] | None = None, **options: Any
    ) -> Engine:
        """Starts an engine, with a connector where kv says which, after the end of the one before; the next order
        waits for it, so that two processes start theirs side by side."""
        if kv is not None:
            options["kv_transfer_config"] = kv
        self.ready()
        self._began = len(self._log.read_text(errors="replace"))
        self.begin(do="start", model=str(model), options=options, env=ENVIRONMENT | (env or {}))
        self._starting = True
        return self

    def ready(self) -> None:
        """Waits until the engine has started."""
        if self._starting:
            self._starting = False
            self._answer(PATIENCE)

    def stop(self) -> None:
        """Ends the engine; the process stays."""
        self.begin(do="stop")
        self.end()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")

    def _answer(self, seconds: float) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            raise AssertionError(f"the engine says nothing for {seconds} s: {self.log()[-3000:]}") from None
        if not line:
            raise AssertionError(f"the engine ended: {self.log()[-3000:]}")
        return json.loads(line)

    def begin(self, **order: Any) -> None:
        """Tells it what to do, and does not wait."""
        self.ready()
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def end(self, seconds: float = PATIENCE) -> dict[str, Any]:
        """Its answer to what it was told."""
        return self._answer(seconds)

    def generate(self, *seeds: int, tokens: int = 600, new: int = 24) -> dict[str, Any]:
        self.begin(do="generate", prompts=list(seeds), tokens=tokens, new=new)
        return self.end()

    def forget(self) -> None:
        """Empties the engine's own prefix cache, so that only the pool can have blocks."""
        self.begin(do="forget")
        assert self.end()["ok"]

    def memory(self) -> int:
        """Bytes of memory that the process has of its own."""
        return own_memory(self._process.pid)

    def attached(self) -> None:
        """Waits until the engine is back at a daemon that was started anew."""

        def ask() -> bool:
            self.begin(do="attached")
            return self.end()["ok"]

        until(ask, say="the engine does not come back")

    def log(self) -> str:
        """What the present engine has logged."""
        return self._log.read_text(errors="replace")[self._began :]

    def close(self) -> None:
        with contextlib.suppress(OSError, AssertionError):
            self.begin(do="exit")
        try:
            self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise AssertionError(f"the engine does not end: {self.log()[-3000:]}") from None


def transfer(address: str, **extra: Any) -> dict[str, Any]:
    """--kv-transfer-config of the connector."""
    return {
        "kv_connector": "KvtierConnector",
        "kv_role": "kv_both",
        "kv_connector_module_path": "kvtier.vllm",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"address": address, **extra},
    }


def until(what: Any, seconds: float = 60, say: str = "") -> Any:
    """Waits until what() is true, and gives it."""
    end = time.monotonic() + seconds
    while not (value := what()):
        if time.monotonic() > end:
            raise AssertionError(say or "it does not come to pass")
        time.sleep(0.02)
    return value


@contextlib.contextmanager
def closing(*things: Any) -> Iterator[None]:
    """Closes all, the last first."""
    with contextlib.ExitStack() as stack:
        for thing in things:
            stack.callback(thing.close)
        yield
