"""Writing results as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from kedge import __version__


def save(console: Console, file: Path, results: Mapping[str, object]) -> None:
    """Write results with a description of the machine, and print the file's path."""
    write(file, results)
    console.print(f"results: {file}", markup=False, highlight=False)


def write(file: Path, results: Mapping[str, object]) -> None:
    """Write results with a description of the machine, atomically: if interrupted, the file keeps its earlier
    content.
    """
    partial = file.with_name(f"{file.name}.part")
    text = json.dumps({"machine": _machine(), **results}, indent=1, ensure_ascii=False)
    partial.write_text(text + "\n", encoding="utf-8")
    partial.replace(file)


def _machine() -> dict[str, object]:
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "processor": platform.machine(),
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpu": gpu,
        "python": platform.python_version(),
        "kedge": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
    }
