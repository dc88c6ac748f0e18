"""The package itself."""

import pathlib
import re
import subprocess
import sys
import textwrap

import kvtier

HERE = pathlib.Path(kvtier.__file__).resolve().parent


def run(code, *args):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(HERE.parent), *args],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def test_import():
    """It is quick, and brings nothing along that is not needed."""
    code = """
        import sys, time
        sys.path.insert(0, sys.argv[1])
        began = time.process_time()
        import kvtier
        print(time.process_time() - began)
        print(*(m for m in ("asyncio", "ssl", "numpy", "torch", "vllm", "ctypes") if m in sys.modules))
    """
    out = [run(code).split() for _ in range(3)]
    assert min(float(o[0]) for o in out) < 0.3 and out[0][1:] == []


def test_all():
    for name in kvtier.__all__:
        assert getattr(kvtier, name).__doc__, name
    assert (HERE / "py.typed").exists()


def test_statuses():
    for status in kvtier.Status:
        if status:
            from kvtier._errors import error_of

            assert error_of(status).status == status and isinstance(error_of(status), kvtier.Error)


def test_readme(shared_daemon):
    """The example of the README runs."""
    text = (HERE.parent / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.S).group(1)
    code = code.replace('"unix:/var/lib/kvtier/session.sock"', repr(shared_daemon.unix))
    out = run("import sys\nsys.path.insert(0, sys.argv[1])\n" + code)
    assert "prefix 2" in out and "True" in out


def test_examples(shared_daemon):
    for example in sorted((HERE.parent / "examples").glob("*.py")):
        out = subprocess.run(
            [sys.executable, str(example), shared_daemon.unix],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
            env={"PYTHONPATH": str(HERE.parent), "PATH": ""},
        ).stdout
        assert "ok" in out, example
