"""The script of the sandbox's child process; `kedge.workloads.sandbox` starts it.

Arguments: CPU seconds, memory in bytes, file size in bytes, the descriptor that the error's name is written to. The
code comes by stdin. The working directory is the only place where the code may write.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import sys
from _signal import SIGKILL  # type: ignore[import-not-found]  # `signal` takes half as long as Python's start
from contextlib import suppress

TYPE_CHECKING = False
if TYPE_CHECKING:  # typing takes long to import
    from typing import Any

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
MAX_FILES = 64
"""Files that may be open at once, and that may be opened for writing"""
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
REFUSED_ROOMS = frozenset({"ctypes", "fcntl", "mmap", "pty", "resource", "socket", "sqlite3", "subprocess", "syslog"})
REFUSED = frozenset({
    "os.exec", "os.fork", "os.forkpty", "os.kill", "os.killpg", "os.link", "os.posix_spawn", "os.spawn",
    "os.startfile", "os.symlink", "os.system", "signal.pthread_kill", "gc.get_objects", "gc.get_referrers",
    "sys.addaudithook", "cpython.PyInterpreterState_New",
})  # fmt: skip
REFUSED_MODULES = frozenset({
    "_ctypes", "_curses", "_dbm", "_gdbm", "_interpreters", "_multiprocessing", "_posixshmem", "_posixsubprocess",
    "_sqlite3", "_testcapi", "_tkinter", "_xxsubinterpreters", "ctypes", "fcntl", "readline", "resource", "termios",
})  # fmt: skip
CHANGES = frozenset({
    "os.chmod", "os.chown", "os.mkdir", "os.remove", "os.removexattr", "os.rename", "os.rmdir", "os.setxattr",
    "os.truncate", "os.utime",
})  # fmt: skip
LOOKS = frozenset({"os.chdir", "os.listdir", "os.scandir"})


def end_with_parent(report: int) -> None:
    """Have the kernel kill this process group when the only reader of `report` has died."""
    if sys.platform != "linux":
        return
    fcntl.fcntl(report, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(report, fcntl.F_SETSIG, SIGKILL)
    fcntl.fcntl(report, fcntl.F_SETFL, fcntl.fcntl(report, fcntl.F_GETFL) | os.O_ASYNC)
    broken = select.poll()
    broken.register(report, 0)
    if broken.poll(0):  # it died before
        os._exit(1)


def leave_network() -> None:
    """Move into a network namespace without interfaces where the kernel allows it; the audit hook holds in any case."""
    if sys.platform != "linux":
        return
    if hasattr(os, "unshare"):
        with suppress(OSError):
            os.unshare(CLONE_NEWUSER | CLONE_NEWNET)
        return
    import ctypes  # only where `os.unshare` is missing, before Python 3.12

    ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNET)


def limit(cpu_seconds: int, memory: int, file_size: int) -> None:
    """Set the resource limits; sizes in bytes."""
    limits = {
        "RLIMIT_CPU": cpu_seconds, "RLIMIT_AS": memory, "RLIMIT_FSIZE": file_size, "RLIMIT_NOFILE": MAX_FILES,
        "RLIMIT_NPROC": 0, "RLIMIT_CORE": 0,
    }  # fmt: skip
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))


def guard(home: str, readable: tuple[str, ...]) -> None:
    """Install the audit hook. It keeps what it needs in its own cells, so that code cannot patch it from outside."""
    refused, rooms, modules, changes, looks, writing = REFUSED, REFUSED_ROOMS, REFUSED_MODULES, CHANGES, LOOKS, WRITING
    getcwd, fspath, error, nothing = os.getcwd, os.fspath, PermissionError, None
    text, raw, kind = str, bytes, isinstance
    writes, every, number, step = iter(range(MAX_FILES)), all, int, next

    def inside(path: Any, roots: tuple[str, ...]) -> bool:
        if path is nothing or kind(path, number):
            return True
        name = fspath(path)
        name = raw.decode(name) if kind(name, raw) else name
        name = name if text.startswith(name, "/") else f"{getcwd()}/{name}"
        return ".." not in text.split(name, "/") and text.startswith(text.rstrip(name, "/") + "/", roots)

    def allowed(event: str, args: tuple) -> bool:
        if event in refused or text.partition(event, ".")[0] in rooms:
            return False
        if event == "import":
            return text.partition(args[0], ".")[0] not in modules
        if event == "open":
            if args[2] & writing:
                return inside(args[0], (home,)) and step(writes, nothing) is not nothing
            return inside(args[0], (home, *readable))
        if event in changes:
            return every(inside(path, (home,)) for path in args[: 2 if event == "os.rename" else 1])
        return event not in looks or inside(args[0], (home, *readable))

    def hook(event: str, args: tuple) -> None:
        if not allowed(event, args):
            raise error(f"{event} is not allowed here")

    sys.addaudithook(hook)


def execute(source: bytes) -> BaseException | None:
    """Run `source` as the main module; return what it raised, or None for an exit with code 0."""
    module = type(sys)("__main__")
    module.__dict__.update(exit=sys.exit, quit=sys.exit)
    sys.modules["__main__"] = module
    try:
        exec(compile(source, "<answer>", "exec"), module.__dict__)
        sys.stdout.flush()
    except SystemExit as error:
        sys.stdout.flush()
        return error if error.code else None
    except BaseException as error:
        return error.with_traceback(None)
    return None


def main() -> None:
    """Run the code from stdin under all limits and report the name of its error."""
    cpu_seconds, memory, file_size, report = map(int, sys.argv[1:])
    end_with_parent(report)
    source = sys.stdin.buffer.read()
    leave_network()
    limit(cpu_seconds, memory, file_size)
    sys.argv = [""]
    for name in REFUSED_MODULES:
        sys.modules.pop(name, None)
    home = os.getcwd() + "/"  # noqa: PTH109 (importing pathlib takes longer than all of this)
    guard(home, tuple(path.rstrip("/") + "/" for path in sys.path))
    error = execute(source)
    try:
        sys.stdout.flush()
    except (OSError, ValueError) as unwritten:
        error = error or unwritten
    if error is not None:
        os.write(report, type(error).__name__.encode())
    os._exit(error is not None)


if __name__ == "__main__":
    main()
