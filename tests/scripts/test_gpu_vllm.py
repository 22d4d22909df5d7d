"""The kit that brings stock vLLM to a GPU, rehearsed on a CPU: vLLM's CUDA code with Kedge's kernels, interpreted.

KEDGE_REHEARSAL_PYTHON names a Python 3.12 with such a machine's packages (torch 2.11 with CUDA, Triton, Transformers).
The kit is what `scripts/gpu/vllm/prepare.sh` has packed, or unpacked in GPU_VLLM_KEEP.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KIT = ROOT / "scripts" / "gpu" / "vllm"
PYTHON = os.environ.get("KEDGE_REHEARSAL_PYTHON")
UNPACKED = Path(os.environ.get("GPU_VLLM_KEEP", ""))
HAS_KIT = (ROOT / ".gpu-vllm" / "sums").exists() or (UNPACKED / "done").exists()


def on_device(folder: Path, out: Path, *steps: str, **env: str) -> subprocess.CompletedProcess[str]:
    """A run of the kit in a folder."""
    command = ["bash", str(KIT / "on_device.sh"), *steps]
    env = {**os.environ, "OUT": str(out), "OMP_NUM_THREADS": "1", "PYTHONPATH": "", **env}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=1500)


def test_some_of_the_parts_are_kept_for_the_next_run(tmp_path: Path) -> None:
    packed = tmp_path / ".gpu-vllm"
    packed.mkdir()
    (packed / "sums").write_text(f"{'0' * 64}  part-00\n{'1' * 64}  part-01\n", encoding="utf-8")
    (packed / "part-01").write_bytes(b"carried first")
    done = on_device(tmp_path, tmp_path / "out", "ops", GPU_VLLM_KEEP=str(tmp_path / "kept"))
    assert done.returncode == 0 and "kept 1 of 2 parts; copy the others next" in done.stdout, done.stderr
    assert (tmp_path / "kept" / "parts" / "part-01").read_bytes() == b"carried first"


@pytest.mark.slow
@pytest.mark.skipif(PYTHON is None, reason="KEDGE_REHEARSAL_PYTHON names no Python with a GPU machine's packages")
@pytest.mark.skipif(not HAS_KIT, reason="the kit is not packed (scripts/gpu/vllm/prepare.sh)")
def test_vllms_cuda_code_runs_with_the_plug_in(tmp_path: Path) -> None:
    stubs, out = tmp_path / "stubs", tmp_path / "out"
    stubs.mkdir()
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        command = ["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(stubs / name)]
        subprocess.run([*command, str(KIT / "rehearsal" / "stubs.c")], check=True)
    kept = UNPACKED if (UNPACKED / "done").exists() else tmp_path / "kept"
    own = {"PYTHON": str(PYTHON), "REHEARSAL": str(KIT / "rehearsal"), "LD_LIBRARY_PATH": str(stubs)}
    own |= {"GPU_VLLM_KEEP": str(kept), "SIZE": "tiny", "EAGER": "1", "LIMIT": "600"}
    done = on_device(ROOT, out, "translate", "exact", **own)
    logs = {name: (out / f"{name}.log").read_text(encoding="utf-8") for name in ("translate", "exact")}
    assert done.stdout.count("exit status 0") == 2, done.stdout + done.stderr + logs["translate"][-3000:]
    agents = [json.loads(line) for line in logs["translate"].splitlines() if line.startswith("{")]
    assert [agent["translated_tokens"] > 100 for agent in agents] == [False, True, True]
    assert "30 of 30 answers have the same tokens" in logs["exact"]
