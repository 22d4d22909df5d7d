"""The guide's example runs as it is, and its output has the documented hits."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.slow
def test_the_cycle_is_found_from_the_second_turn_on() -> None:
    command = [sys.executable, str(EXAMPLES / "vllm_cycle.py")]
    found = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    turns = re.findall(r"^turn \d: (\d+) of 2590 prompt tokens found$", found.stdout, re.MULTILINE)
    assert turns[0] == "0" and len(turns) == 3
    assert all(int(tokens) > 1280 for tokens in turns[1:]), "vLLM alone finds none: the cycle does not fit"
