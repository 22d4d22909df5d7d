"""Traces are read; a bad line is named by file, line and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.bench.sessions.arrivals import SLICE, read_trace
from kedge.errors import ConfigError
from tests.bench.sessions.builders import AGENT, MOONCAKE, write

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_line_of_an_agent_trace_becomes_a_record(name: str, tmp_path: Path) -> None:
    line = {**AGENT, "parent": "s9", "dur": None, "gap": None, "tools": 128, "system": 64, "scope": "file"}
    (found,) = read_trace(write(tmp_path / name, [line, "", "  "]))
    assert (found.session, found.conversation, found.agent, found.parent) == ("s0", "c0", "main", "s9")
    assert (found.at, found.seconds, found.gap, found.stop) == (0.0, 0.0, None, "tool")
    assert (found.tokens, found.output_tokens, found.block_size, found.blocks) == (1024, 10, 64, 2)
    assert (found.tools_tokens, found.system_tokens, found.is_shared) == (128, 64, True)


def test_sizes_of_tools_count_at_a_session_s_first_request_only(tmp_path: Path) -> None:
    (found,) = read_trace(write(tmp_path / "t", [{**AGENT, "turn": 1, "tools": 128, "system": 64}]))
    assert (found.tools_tokens, found.system_tokens) == (0, 0)


def test_a_line_of_mooncake_becomes_a_record(tmp_path: Path) -> None:
    (found,) = read_trace(write(tmp_path / "t", [MOONCAKE]))
    assert (found.at, found.tokens, found.output_tokens, found.stop) == (1.5, 1025, 7, "?")
    assert (found.runs, list(found.ids()), found.blocks) == (((3, 1), (4, 1), (9, 1)), [3, 4, 9], 3)


def test_mooncake_s_sessions_are_found_by_their_last_full_block(tmp_path: Path) -> None:
    def line(tokens: int, *ids: int) -> dict[str, Any]:
        return {"timestamp": 0, "input_length": tokens, "output_length": 1, "hash_ids": ids}

    lines = [
        (line(1025, 1, 2, 3), "m0"),  # ends in block 2: block 3 is partial
        (line(1024, 1, 7), "m1"),  # shares the first block only
        (line(2048, 1, 2, 4, 5), "m0"),  # goes on where the first ended
        (line(1536, 1, 7, 8), "m1"),
        (line(1024, 1, 2), "m2"),  # an older state of the first, which is in block 5 by now
        (line(600, 99), "m3"),  # nobody can go on from a single block
        (line(1024, 99, 98), "m4"),
        (line(100), "m5"),
        (line(1536, 99, 98, 97), "m4"),
        (line(1024, 99, 98), "m6"),
        (line(2048, 99, 98, 97, 96), "m4"),  # the deepest end counts
        (line(1536, 1, 2, 60), "m2"),
        (line(2048, 1, 2, 60, 61), "m2"),
    ]
    found = read_trace(write(tmp_path / "t", [line for line, _ in lines]))
    assert [one.session for one in found] == [session for _, session in lines]


WRONG_AGENT: list[tuple[str, Any]] = [
    ("s", ""), ("s", 5), ("s", "x" * 201), ("c", None), ("agent", []), ("parent", 3), ("why", None), ("scope", 7),
    ("turn", -1), ("turn", 1.5), ("t", -1), ("t", "0"), ("t", float("nan")), ("t", 1e10), ("dur", float("inf")),
    ("gap", True), ("n", True), ("n", -1), ("n", 2**31), ("o", None), ("bs", 0), ("bs", 100), ("bs", 1024),
    ("h", None), ("h", [1]), ("h", [[1]]), ("h", [[1, 2, 3]]), ("h", [[0, 17]]), ("h", [[0, 10**12]]),
    ("h", [[-1, 2]]), ("h", [[0, 1.0]]), ("tools", -5), ("system", "9"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG_AGENT, ids=str)
def test_a_bad_value_is_named(key: str, value: Any, tmp_path: Path) -> None:
    line = {**AGENT, "tools": 1, key: value}
    file = write(tmp_path / "t.jsonl", [AGENT, line])
    with pytest.raises(ConfigError, match=rf"^trace='{file}': line 2: {key}[^ ]* is .+: ") as raised:
        read_trace(file)
    assert len(str(raised.value)) < len(str(file)) + 250


@pytest.mark.parametrize("key", ["s", "c", "agent", "turn", "t", "why", "n", "o", "bs", "h"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    file = write(tmp_path / "t", [{name: value for name, value in AGENT.items() if name != key}])
    with pytest.raises(ConfigError, match=rf"line 1: {key} is .+: Field required"):
        read_trace(file)


@pytest.mark.parametrize(
    ("key", "value"),
    [("timestamp", "x"), ("input_length", None), ("output_length", -1), ("hash_ids", 5), ("hash_ids", [1, 2, 3, 4])]
    + [("hash_ids", [1.5]), ("hash_ids", [2**31])],
)
def test_a_bad_value_of_mooncake_is_named(key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf"line 1: {key}[^ ]* is .+: "):
        read_trace(write(tmp_path / "t", [{**MOONCAKE, key: value}]))


@pytest.mark.parametrize("text", ["{", "[]", "5", '"x"', "[" * 100_000, "\x00", '{"s": ' + "9" * 5000 + "}"])
def test_what_is_no_object_is_named_by_its_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 2: (is not valid JSON|it is .*: Input should be a valid dictionary)"):
        read_trace(write(tmp_path / "t", [AGENT, text]))


def test_bytes_that_are_no_text_are_named_by_their_line(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(ConfigError, match="line 1: is not valid JSON"):
        read_trace(tmp_path / "t")


@pytest.mark.parametrize("lines", [[], [""]])
def test_a_trace_without_requests_is_an_error(lines: list[str], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no request"):
        read_trace(write(tmp_path / "t", lines))


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    whole = SLICE.read_bytes()
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "bad.gz").write_bytes(whole[:100] + bytes(50) + whole[150:])
    for name in ("none", "cut.gz", "bad.gz", "."):
        with pytest.raises(ConfigError, match="trace='"):
            read_trace(tmp_path / name)


@given(st.dictionaries(st.sampled_from([*AGENT, *MOONCAKE, "tools", "scope"]), JSON_VALUES, max_size=4), st.booleans())
@settings(max_examples=200, deadline=None)
def test_any_line_is_a_record_or_a_config_error(
    tmp_path_factory: pytest.TempPathFactory, changed: dict[str, Any], is_agent: bool
) -> None:
    file = write(tmp_path_factory.getbasetemp() / "any", [{**(AGENT if is_agent else MOONCAKE), **changed}])
    try:
        (found,) = read_trace(file)
    except ConfigError as error:
        assert "line 1: " in str(error)
    else:
        assert found.blocks <= max(1, -(-found.tokens // 512))
