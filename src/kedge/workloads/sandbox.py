"""A sandbox for Python that a model wrote: a process of its own with limits.

Guarantees:

- Linux and macOS: an isolated interpreter with the standard library only (`-I -S`), an empty environment and an empty
  temporary working directory; limits on wall time (the whole process group is killed), CPU time, size of a file, open
  files; and an audit hook that refuses sockets, subprocesses, fork, exec, signals, ctypes, reading outside of the
  standard library and the working directory, and writing outside of the latter.
- Linux: also a limit on memory. The process ends with its parent, however that ends. No new process or thread, unless
  Kedge runs as root. Where the kernel allows unprivileged user namespaces, the process has no network interface,
  whatever the code does.
- Windows: none; the sandbox does not run there.

The audit hook stops what a model writes by mistake or by habit. It does not stop code made to break out of CPython:
for hostile code run Kedge itself in a container.
"""

import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

WALL = 5
"""Seconds by the clock for each second of a limit: on a busy machine a program waits for a core, and for its start"""
_CHILD = str(Path(__file__).with_name("sandbox_child.py"))


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """The code's output, and the class name of the error that ended it (None where it ran to its end).

    Besides Python's own names: `TimeoutError` when time ran out, `OutputTooLong` when the output was cut, the name of a
    signal that killed it.
    """

    stdout: str
    error: str | None

    @property
    def summary(self) -> str:
        """The error's name, or the output without surrounding white space."""
        return self.error or self.stdout.strip()


def run_python(code: str, seconds: float = 2.0) -> SandboxResult:
    """Run `code` as a main module, with an empty stdin, for so many seconds of processor time; by the clock, for `WALL`
    times as many. Never raises for what the code does.
    """
    read, write = os.pipe()
    with (
        os.fdopen(read, "rb") as report,
        os.fdopen(write, "wb") as given,
        tempfile.TemporaryDirectory(prefix="kedge-", ignore_cleanup_errors=True) as home,
        tempfile.TemporaryFile() as out,
    ):
        process = _start(seconds, home, out, write)
        given.close()  # the child has it
        ended = _finish(process, code.encode("utf-8", "surrogatepass"), WALL * seconds)
        out.seek(0)
        most = 64 << 10
        data = out.read(most + 1)
        error = _error(process, ended, report) or ("OutputTooLong" if len(data) > most else None)
    return SandboxResult(data[:most].decode("utf-8", "replace"), error)


def answer_as_python(answer: str, inputs: Mapping[str, str]) -> str:  # noqa: ARG001 (the signature of a tool)
    """Run an agent's answer and return its output or its error's class name (the tool `python` of workflow files)."""
    return run_python(answer).summary


def _start(seconds: float, home: str, out: IO[bytes], report: int) -> subprocess.Popen[bytes]:
    numbers = (math.ceil(seconds), 512 << 20, 1 << 20, report)  # with the bytes of memory and of a file
    return subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-X", "utf8", _CHILD, *map(str, numbers)],
        stdin=subprocess.PIPE,
        stdout=out,
        stderr=subprocess.DEVNULL,
        cwd=home,
        env={},
        pass_fds=(report,),
        start_new_session=True,
    )


def _finish(process: subprocess.Popen[bytes], code: bytes, seconds: float) -> bool:
    """Wait for the end and kill the rest of the process group; return False where time ran out."""
    try:
        process.communicate(code, timeout=seconds)
        return True
    except subprocess.TimeoutExpired:
        return False
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _error(process: subprocess.Popen[bytes], ended: bool, report: IO[bytes]) -> str | None:
    code = process.returncode
    if not ended or -code in (signal.SIGXCPU, signal.SIGKILL):
        return "TimeoutError"
    if code < 0:
        return next((one.name for one in signal.Signals if one == -code), f"signal {-code}")  # some have no name
    name = report.read(200).decode("utf-8", "replace")
    return (name if name.isidentifier() else "SystemExit") if code else None
