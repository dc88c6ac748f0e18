"""What `make wheel` has made, installed (KVTIER_WHEEL)."""

import os
import pathlib
import subprocess
import sys
import sysconfig
import zipfile

import pytest

HERE = pathlib.Path(__file__).resolve().parent


def test_wheel(tmp_path):
    given = os.environ.get("KVTIER_WHEEL")
    if not given:
        pytest.skip("KVTIER_WHEEL names no wheel")
    wheel = (HERE.parent / given).resolve()
    assert "-py3-none-manylinux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert "kvtier/py.typed" in names and not [n for n in names if "test" in n]
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "v")], check=True)
    python = tmp_path / "v" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", str(wheel)], check=True)
    out = subprocess.run([tmp_path / "v" / "bin" / "kvtier", "version"], check=True, stdout=subprocess.PIPE, text=True)
    assert "kvtier" in out.stdout
    env = {**os.environ, "PYTHONPATH": sysconfig.get_paths()["platlib"]}  # for xxhash
    code = "import kvtier; print(kvtier.__file__)"
    out = subprocess.run([python, "-c", code], check=True, stdout=subprocess.PIPE, text=True, env=env, cwd=tmp_path)
    assert str(tmp_path) in out.stdout
