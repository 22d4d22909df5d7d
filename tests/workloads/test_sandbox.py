"""Code that behaves, and code that does not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kedge.errors import ConfigError
from kedge.workloads import sandbox
from kedge.workloads.sandbox import SandboxLimits, SandboxResult, answer_as_python, run_python
from tests.processes import is_alive, linux_only

SHORT = SandboxLimits(seconds=0.6)


def test_prints() -> None:
    outcome = run_python("def solve():\n    return 6 * 7\nprint(solve())")
    assert outcome == SandboxResult("42\n", None)
    assert outcome.summary == "42"


def test_main_module_and_standard_library() -> None:
    code = "import json, math, re, itertools\nif __name__ == '__main__':\n    print(json.dumps([math.pi > 3, 'ä']))"
    assert run_python(code).summary == '[true, "\\u00e4"]'


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("1 / 0", "ZeroDivisionError"),
        ("def", "SyntaxError"),
        ("nothing", "NameError"),
        ("assert False", "AssertionError"),
        ("class Odd(Exception): pass\nraise Odd('x\\ny')", "Odd"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("def f(): f()\nf()", "RecursionError"),
        ("input()", "EOFError"),
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
    outcome = run_python(code)
    assert outcome.error == error
    assert outcome.summary == error


@pytest.mark.parametrize("code", ["", "import sys; sys.exit()", "import sys; sys.exit(0)", "exit()"])
def test_good_exits(code: str) -> None:
    assert run_python(code) == SandboxResult("", None)


def test_output_before_an_error_is_kept() -> None:
    assert run_python("print('before')\n1 / 0") == SandboxResult("before\n", "ZeroDivisionError")


def test_output_is_cut() -> None:
    outcome = run_python("print('x' * 3000)", SandboxLimits(output_kb=2))
    assert outcome == SandboxResult("x" * 2048, "OutputTooLong")


def test_a_program_that_has_to_wait_for_a_core_is_not_stopped() -> None:
    assert run_python("import time; time.sleep(0.9); print('done')", SHORT).summary == "done"


@pytest.mark.parametrize("code", ["while True: pass", "import time; time.sleep(1000)"])
def test_endless_code_is_killed(code: str) -> None:
    assert run_python(f"print('on', flush=True)\n{code}", SHORT) == SandboxResult("on\n", "TimeoutError")


def test_growing_memory_ends() -> None:
    code = "kept = []\nwhile True:\n    kept.append(bytes(1 << 20))"
    assert run_python(code, SandboxLimits(memory_mb=64)).error == "MemoryError"


@pytest.mark.parametrize(
    "code",
    [
        "import socket; socket.socket()",
        "import socket; socket.getaddrinfo('localhost', 80)",
        "import urllib.request; urllib.request.urlopen('file:///etc/passwd')",
        "import os; os.fork()",
        "import os; os.system('true')",
        "import os; os.execv('/bin/true', ['true'])",
        "import os; os.posix_spawn('/bin/true', ['true'], {})",
        "import os; os.kill(os.getppid(), 0)",
        "import subprocess; subprocess.run(['true'])",
        "import ctypes",
        "import _posixsubprocess",
        "import resource",
        "import os; os.symlink('/', 'root')",
        "open('/etc/passwd')",
        "import os; os.listdir('/')",
        "open('../file', 'w')",
        "import os; os.rename('/tmp/a', 'b')",
        "class Path(str):\n    def startswith(self, *_): return True\nopen(Path('/etc/passwd'))",
        "while True: open('f', 'w')",
    ],
)
def test_refused(code: str) -> None:
    assert run_python(code).error in ("PermissionError", "URLError")


def test_refusals_are_caught_by_no_patch() -> None:
    code = "import sys, os\nos.path.realpath = os.fspath = os.getcwd = lambda *_: ''\nopen('/etc/passwd')"
    assert run_python(code).error == "PermissionError"


def test_nothing_is_written_outside(tmp_path: Path) -> None:
    target = tmp_path / "file"
    assert run_python(f"open({str(target)!r}, 'w')").error == "PermissionError"
    assert not target.exists()


def test_files_of_its_own_are_allowed_and_gone_afterwards() -> None:
    code = "import os\nopen('f', 'w').write('x')\nos.mkdir('d')\n"
    code += "print(sorted(os.listdir()), open('f').read(), os.getcwd())"
    outcome = run_python(code)
    assert outcome.stdout.startswith("['d', 'f'] x ")
    assert not Path(outcome.stdout.split()[-1]).exists()


def test_environment_is_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET", "1")
    assert run_python("import os; print('SECRET' in os.environ)").summary == "False"


def test_output_that_is_no_utf8() -> None:
    assert run_python("import sys; sys.stdout.buffer.write(b'a\\xffb')") == SandboxResult("a\ufffdb", None)


def test_stderr_is_no_output() -> None:
    assert run_python("import sys; print('x' * 200_000, file=sys.stderr); print('y')") == SandboxResult("y\n", None)


def test_no_descriptor_is_left_open() -> None:
    folder = Path(f"/proc/{os.getpid()}/fd")
    if not folder.is_dir():
        pytest.skip("needs /proc")
    run_python("1")
    before = len(list(folder.iterdir()))
    for code in ("1", "1 / 0", "print(1)"):
        run_python(code)
    assert len(list(folder.iterdir())) == before


@pytest.mark.parametrize("key", ["seconds", "memory_mb", "file_mb", "output_kb"])
def test_limits_are_above_zero(key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        SandboxLimits(**{key: 0})


def test_tool() -> None:
    assert answer_as_python("print(1 + 1)", {"user_question": "?"}) == "2"


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
run = threading.Thread(target=sandbox.run_python, args=(code, sandbox.SandboxLimits(seconds=1000)), daemon=True)
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
        assert process.stdout
        pid = int(process.stdout.readline())
        time.sleep(wait)
        assert is_alive(pid)
        ENDS[way](process)
    late = time.monotonic() + 60
    while is_alive(pid):
        assert time.monotonic() < late, os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
