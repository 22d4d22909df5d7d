"""Starting the engine's process, and waiting for its end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path

ENDING = 60.0
"""Seconds that the process may take to end before it is killed."""


def start() -> tuple[subprocess.Popen[bytes], Connection]:
    """Start the process and connect to it. It imports from where this one does, and from nowhere else."""
    ours, theirs = socket.socketpair()
    path = os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kedge.engine.process.child", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            pass_fds=[theirs.fileno()],
            env={**os.environ, "PYTHONPATH": path},
        )
    return process, Connection(ours.detach())


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """Return the exit code of a process that has hung up."""
    try:
        return process.wait(ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()
