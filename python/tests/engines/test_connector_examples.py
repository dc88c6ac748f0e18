"""The examples run as their guides say."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

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
