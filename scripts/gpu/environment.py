"""Prints as JSON what a machine has: its GPU, its driver, its Python packages, and which of those needed it lacks.

PYTHONPATH=src python -m scripts.gpu.environment
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

NEEDED = {
    "torch": "torch", "transformers": "transformers", "safetensors": "safetensors", "numpy": "numpy",
    "pydantic": "pydantic", "pydantic_settings": "pydantic-settings", "typer": "typer", "rich": "rich",
    "yaml": "pyyaml", "pytest": "pytest", "hypothesis": "hypothesis",
}  # fmt: skip
"""The modules that the stages import, each with the package that provides it."""
ON_GPU = {"triton": "triton"}
SHOWN = ("torch", "triton", "transformers", "numpy", "pydantic")


def missing(needed: Mapping[str, str]) -> dict[str, str]:
    """Return the packages that cannot be imported, each with the reason."""
    found = {}
    for module, package in needed.items():
        try:
            importlib.import_module(module)
        except ImportError as error:
            found[package] = str(error)
    return found


def remedy(packages: Mapping[str, str]) -> str:
    """Return how to install missing packages, as text."""
    names, python = " ".join(sorted(packages)), ".".join(map(str, sys.version_info[:2]))
    platforms = " ".join(f"--platform manylinux{tag}_{platform.machine()}" for tag in ("2014", "_2_28"))
    return (
        "missing Python packages:\n"
        + "".join(f"  {name}: {reason}\n" for name, reason in sorted(packages.items()))
        + f"With a network: python3 -m pip install {names}\n"
        + "Without one, on a machine that has it:\n"
        + f"  python3 -m pip download --only-binary=:all: --python-version {python} {platforms} -d wheels {names}\n"
        + "then bring the folder and set GPU_WHEELS=wheels.\n"
    )


def describe(device: str) -> dict[str, Any]:
    """Return a description of the machine; without torch, only that it is missing."""
    lacking = missing(NEEDED | (ON_GPU if device == "cuda" else {}))
    return {
        "python": platform.python_version(),
        "processor": platform.machine(),
        "cores": os.cpu_count(),
        "packages": {name: _version(name) for name in SHOWN},
        "missing": lacking,
        "driver": _driver(),
        **({} if "torch" in lacking else {"gpu": _gpu()}),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _driver() -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    answer = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    return answer.stdout.strip().splitlines()[0] if answer.returncode == 0 and answer.stdout.strip() else None


def _gpu() -> dict[str, Any] | None:
    import torch

    if not torch.cuda.is_available():
        return None
    found = torch.cuda.get_device_properties(0)
    return {
        "name": found.name,
        "capability": f"{found.major}.{found.minor}",
        "memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1] if len(sys.argv) > 1 else "cuda")))
