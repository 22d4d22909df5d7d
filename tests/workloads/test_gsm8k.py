"""GSM8K's team: what it reads out of answers, and its agents' programs."""

from __future__ import annotations

import pytest

from kedge.workloads.gsm8k import code, number


@pytest.mark.parametrize(
    ("text", "stated"),
    [
        ("He has 3 + 4 = 7. The answer is 7.", "7"),
        ("The answer is $1,200.50", "1200.5"),
        ("The answer is: **42**", "42"),
        ("First the answer is 3, no: the answer is 4. It took 9 minutes.", "4"),
        ("so #### -10", "-10"),
        ("12 apples and 5 pears", "5"),
        ("The answer is -0.0", "0"),
        ("nothing", None),
        ("", None),
    ],
)
def test_number(text: str, stated: str | None) -> None:
    assert number(text) == stated


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("Here:\n```python\ndef f():\n    return 1\n```\nDone.", "def f():\n    return 1"),
        ("```\n$ ls\n```\n```py\nimport math\nprint(math.pi)\n```", "import math\nprint(math.pi)"),
        ("```python\ndef a(): pass\n```\nbetter:\n```python\ndef b(): pass\n```", "def b(): pass"),
        ("```\nprint(6 * 7)\n```", "print(6 * 7)"),
        ("```python\nprint('unended)\n```", "print('unended)"),
        ("```python\ndef cut_short():\n    return", "def cut_short():\n    return"),
        ("Sure.\n\nfrom typing import List\n\ndef f(): ...\n", "from typing import List\n\ndef f(): ..."),
        ("I would use a loop.", None),
    ],
)
def test_code(text: str, program: str | None) -> None:
    assert code(text) == program
