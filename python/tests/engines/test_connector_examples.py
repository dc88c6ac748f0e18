"""The examples run as their guides say."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import time

import pytest

from connector_rig import PACKAGE, binary

EXAMPLES = PACKAGE.parent / "examples"


def run(tmp_path: pathlib.Path, *arguments: str, **env: str) -> str:
    """Runs a script with the program on the PATH, and gives what it says."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "kvtier").symlink_to(os.path.abspath(binary()))
    environment = (
        os.environ
        | {"PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "PYTHON": sys.executable, "PYTHONPATH": str(PACKAGE)}
        | env
    )
    ran = subprocess.run(arguments, env=environment, capture_output=True, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    return ran.stdout


def test_long_context(tmp_path: pathlib.Path) -> None:
    said = run(tmp_path, str(EXAMPLES / "long-context" / "run.sh")).splitlines()
    assert said[1].startswith("later") and "NVME" in said[1]
    assert said[2].startswith("prefetch  48 of 48")
    assert said[3].split(None, 1) == ["now", "{'MEMORY': 48}"]
    assert said[4].endswith("all bytes right")


def versitygw() -> str:
    """The S3 server that make servers installs, or the one on the PATH."""
    installed = sorted((PACKAGE.parent / ".bin").glob("versitygw@*"))
    found = str(installed[-1]) if installed else shutil.which("versitygw")
    if found is None:
        if "versitygw" in os.environ.get("KVTIER_REQUIRE", "").split(","):
            pytest.fail("versitygw is required: make servers installs it")
        pytest.skip("no versitygw: make servers installs it")
    return found


def test_long_context_in_objects(tmp_path: pathlib.Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    (tmp_path / "s3" / "kvtier").mkdir(parents=True)  # to this server, a directory is a bucket
    server = subprocess.Popen(
        [versitygw(), "--port", address, "--quiet", "--region", "us-east-1", "posix", str(tmp_path / "s3")],
        env=os.environ | {"ROOT_ACCESS_KEY": "test", "ROOT_SECRET_KEY": "testsecret"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(tuple(address.split(":")), timeout=5).close()
                break
            except OSError:
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        said = run(
            tmp_path,
            str(EXAMPLES / "long-context" / "run.sh"),
            f"s3://kvtier/example?path_style=true&region=us-east-1&endpoint=http://{address}",
            AWS_ACCESS_KEY_ID="test",
            AWS_SECRET_ACCESS_KEY="testsecret",
            AWS_SESSION_TOKEN="",
            AWS_EC2_METADATA_DISABLED="true",
        ).splitlines()
    finally:
        server.kill()
        server.wait()
    assert said[1].split(None, 1) == ["later", "{'OBJECT': 48}"]
    assert said[2].startswith("prefetch  48 of 48")
    assert said[3].split(None, 1) == ["now", "{'MEMORY': 48}"]
    assert said[4].endswith("all bytes right")


@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vllm (see make engines)")
def test_shared_pool(tmp_path: pathlib.Path) -> None:
    import connector_model

    connector_model.write(tmp_path / "tiny")
    said = run(
        tmp_path,
        str(EXAMPLES / "shared-pool" / "run.sh"),
        str(tmp_path / "tiny"),
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )
    assert "prefill: 0 of 600 tokens came from the pool" in said
    assert "decode: 512 of 600 tokens came from the pool" in said
    hits = next(line for line in said.splitlines() if line.startswith("g2 ")).split()
    assert "4" in hits
