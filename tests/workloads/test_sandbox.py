"""Code that behaves, and code that does not."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from kedge.workloads import sandbox
from kedge.workloads.sandbox import SandboxResult, answer_as_python, run_python
from tests.processes import is_alive, linux_only

USUAL, SHORT = 2.0, 0.6
MAIN = "import json\nif __name__ == '__main__':\n    print(json.dumps('ä'))"


@pytest.mark.parametrize(
    ("code", "seconds", "stdout", "error"),
    [
        (MAIN, USUAL, '"\\u00e4"\n', None),
        ("", USUAL, "", None),
        ("import sys; sys.exit(0)", USUAL, "", None),
        ("exit()", USUAL, "", None),
        ("import os; print('PATH' in os.environ)", USUAL, "False\n", None),
        ("import sys; sys.stdout.buffer.write(b'a\\xffb')", USUAL, "a\ufffdb", None),
        ("import sys; print('x' * 200_000, file=sys.stderr)", USUAL, "", None),
        ("import time; time.sleep(0.9); print('waits for a core')", SHORT, "waits for a core\n", None),
        ("print('before')\n1 / 0", USUAL, "before\n", "ZeroDivisionError"),
        ("print('x' * 70_000)", USUAL, "x" * 65_536, "OutputTooLong"),
        ("print('on', flush=True)\nwhile True: pass", SHORT, "on\n", "TimeoutError"),
        ("print('on', flush=True)\nimport time; time.sleep(1000)", SHORT, "on\n", "TimeoutError"),
        ("kept = []\nwhile True: kept.append(bytes(1 << 20))", USUAL, "", "MemoryError"),
    ],
)
def test_what_code_leaves(code: str, seconds: float, stdout: str, error: str | None) -> None:
    outcome = run_python(code, seconds)
    assert outcome == SandboxResult(stdout, error)
    assert outcome.summary == (error or stdout.strip())


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("def", "SyntaxError"),
        ("nothing", "NameError"),
        ("assert False", "AssertionError"),
        ("class Odd(Exception): pass\nraise Odd('x\\ny')", "Odd"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def f(): f()\nf()", "RecursionError"),
        ("input()", "EOFError"),
        ("import signal\nsignal.raise_signal(36)", "signal 36"),
        ("import sys; sys.exit(3)", "SystemExit"),
        ("exit('bye')", "SystemExit"),
        ("import os; os._exit(4)", "SystemExit"),
        ("x = '\ud800'", "SyntaxError"),
        ("x = b'x' * 10**9", "MemoryError"),
        ("open('f', 'wb').write(b'x' * 3_000_000)", "OSError"),
        ("print('x' * 100_000)", "OutputTooLong"),
        ("print('x' * 10_000_000)", "OSError"),
    ],
)
def test_errors_by_name(code: str, error: str) -> None:
    assert answer_as_python(code, {"user_question": "?"}) == error


@pytest.mark.parametrize(
    "code",
    [
        *(f"import os; os.{call}" for call in (
            "fork()", "system('true')", "execv('/bin/true', ['true'])", "posix_spawn('/bin/true', ['true'], {})",
            "kill(os.getppid(), 0)", "symlink('/', 'root')", "listdir('/')", "rename('/tmp/a', 'b')",
        )),
        "import socket; socket.socket()", "import socket; socket.getaddrinfo('localhost', 80)",
        "import urllib.request; urllib.request.urlopen('file:///etc/passwd')",
        "import subprocess; subprocess.run(['true'])", "import ctypes", "import _posixsubprocess", "import resource",
        "open('/etc/passwd')", "open('../file', 'w')", "open('/tmp/file', 'w')", "while True: open('f', 'w')",
        "class Path(str):\n    def startswith(self, *_): return True\nopen(Path('/etc/passwd'))",
        "import sys, os\nos.path.realpath = os.fspath = os.getcwd = lambda *_: ''\nopen('/etc/passwd')",
    ],
)  # fmt: skip
def test_refused(code: str) -> None:
    assert run_python(code).error in ("PermissionError", "URLError")


def test_files_of_its_own_are_allowed_and_gone_afterwards() -> None:
    code = "import os\nopen('f', 'w').write('x')\nos.mkdir('d')\n"
    *_, home = run_python(code + "print(sorted(os.listdir()), open('f').read(), os.getcwd())").stdout.split()
    assert home and not Path(home).exists()


def test_no_descriptor_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path(f"/proc/{os.getpid()}/fd")
    if not folder.is_dir():
        pytest.skip("needs /proc")
    run_python("1")
    before = len(list(folder.iterdir()))
    for code in ("1", "1 / 0", "print(1)"):
        run_python(code)
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(OSError, match="/nowhere"):
        run_python("1")
    assert len(list(folder.iterdir())) == before


# the end of the process that runs it ----------------------------------------------------------------------------------

ORPHANING = """
import os, sys, threading
from kedge.workloads import sandbox

begin = sandbox._start

def _start(*args):
    process = begin(*args)
    print(process.pid, flush=True)
    return process

sandbox._start = _start
code = "import time\\nwhile True: time.sleep(1000)"
run = threading.Thread(target=sandbox.run_python, args=(code, 1000), daemon=True)
run.start()
sys.stdin.readline()
os._exit(70)
"""
ENDS = {"killed": subprocess.Popen.kill, "exits": lambda process: process.stdin.close()}


@linux_only
@pytest.mark.parametrize("wait", [0.0, 0.5], ids=["at once", "later"])
@pytest.mark.parametrize("way", ENDS)
def test_it_ends_with_the_process_that_runs_it(way: str, wait: float) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(sandbox.__file__).parents[2])}
    command, pipe = [sys.executable, "-c", ORPHANING], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        pid = int(process.stdout.readline())
        time.sleep(wait)
        assert is_alive(pid)
        ENDS[way](process)
    late = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < late, os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
