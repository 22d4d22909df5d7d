"""Traces are read, a bad line is named by file, line and key, and arrivals are composed of their conversations."""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.bench.sessions.arrivals import (
    MAX_TOKENS,
    RECORDED,
    SLICE,
    Arrival,
    Conversation,
    SessionBenchSettings,
    compose,
    conversations,
    is_traffic,
    load_traces,
    read_trace,
    traffic_of,
    working_set,
)
from kedge.errors import ConfigError
from tests.bench.sessions.builders import AGENT, MOONCAKE, record, traffic, write

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)

# lines ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_a_line_of_an_agent_trace_becomes_a_record(name: str, tmp_path: Path) -> None:
    line = {**AGENT, "parent": "s9", "dur": None, "gap": None, "tools": 128, "system": 64, "scope": "file"}
    (found,) = read_trace(write(tmp_path / name, [line, "", "  "]))
    assert (found.session, found.conversation, found.agent, found.parent) == ("s0", "c0", "main", "s9")
    assert (found.at, found.seconds, found.gap, found.stop) == (0.0, 0.0, None, "tool")
    assert (found.tokens, found.output_tokens, found.block_size) == (1024, 10, 64)
    assert (found.tools, found.system, found.is_shared) == (128, 64, True)


def test_a_line_of_mooncake_becomes_a_record(tmp_path: Path) -> None:
    (found,) = read_trace(write(tmp_path / "t", [MOONCAKE]))
    assert (found.at, found.tokens, found.output_tokens, found.stop) == (1.5, 1025, 7, "?")
    assert (found.runs, list(found.ids())) == (((3, 1), (4, 1), (9, 1)), [3, 4, 9])


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
    ("s", ""), ("s", 5), ("s", "x" * 201), ("c", None), ("parent", 3), ("turn", -1), ("turn", 1.5), ("t", "0"),
    ("t", float("nan")), ("t", 1e10), ("gap", True), ("n", True), ("n", 2**31), ("bs", 0), ("bs", 100), ("bs", 1024),
    ("h", [[1]]), ("h", [[1, 2, 3]]), ("h", [[0, 17]]), ("h", [[0, 10**12]]), ("h", [[0, 1.0]]), ("system", "9"),
]  # fmt: skip
WRONG_MOONCAKE: list[tuple[str, Any]] = [("timestamp", "x"), ("hash_ids", [1, 2, 3, 4]), ("hash_ids", [2**31])]


@pytest.mark.parametrize(
    ("good", "key", "value"),
    [*((AGENT, *one) for one in WRONG_AGENT), *((MOONCAKE, *one) for one in WRONG_MOONCAKE)],
    ids=str,
)
def test_a_bad_value_is_named(good: dict[str, Any], key: str, value: Any, tmp_path: Path) -> None:
    file = write(tmp_path / "t.jsonl", [good, {**good, key: value}])
    with pytest.raises(ConfigError, match=rf"^trace='{file}': line 2: {key}[^ ]* is .+: ") as raised:
        read_trace(file)
    assert len(str(raised.value)) < len(str(file)) + 250


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "[" * 100_000, "\x00", '{"s": ' + "9" * 5000 + "}"])
def test_what_is_no_object_is_named_by_its_line(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="line 2: (is not valid JSON|it is .*: Input should be a valid dictionary)"):
        read_trace(write(tmp_path / "t", [AGENT, text]))


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    whole = SLICE.read_bytes()
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "bad.gz").write_bytes(whole[:100] + bytes(50) + whole[150:])
    (tmp_path / "bytes").write_bytes(b"\xff\xfe{}\n")
    (tmp_path / "empty").write_bytes(b"\n")
    for name in ("none", "cut.gz", "bad.gz", "bytes", "empty", "."):
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
        assert len(list(found.ids(512 // found.block_size))) <= max(1, -(-found.tokens // 512))


def test_traces_have_names_of_their_own_and_prompts_that_are_short_enough(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    files = [write(tmp_path / "t.jsonl", [AGENT]), write(tmp_path / "other" / "t.jsonl.gz", [AGENT])]
    with pytest.raises(ConfigError, match="is the second trace named t"):
        load_traces(files)
    with pytest.raises(ConfigError, match="has no conversation whose prompts are all short enough"):
        load_traces([write(tmp_path / "t.jsonl", [{**AGENT, "n": MAX_TOKENS + 1}])])
    turns = [record(c="a"), record(c="b", n=MAX_TOKENS + 1), record(c="b", n=999), record(c="c", n=MAX_TOKENS)]
    assert [one[0].record.conversation for one in conversations(turns)] == ["a", "c"]


def test_the_slice_says_where_it_is_from_and_under_which_licence() -> None:
    text = (SLICE.parent / "README.md").read_text(encoding="utf-8")
    assert SLICE.name in text and "Apache License 2.0" in text
    assert "Apache License" in (SLICE.parent / "LICENSE-APACHE-2.0.txt").read_text(encoding="utf-8")
    assert SLICE.stat().st_size < 60_000


# chains of coarse blocks: same integer, same whole prefix -------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), max_size=6), st.sampled_from([1, 2, 4, 8]))
def test_a_coarse_id_is_that_of_the_last_fine_block(runs: list[tuple[int, int]], step: int) -> None:
    one = record(n=10_000, h=[list(run) for run in runs])
    fine = [block for first, count in runs for block in range(first, first + count)]
    assert list(one.ids(step)) == fine[step - 1 :: step]
    assert list(one.ids()) == fine


def test_ids_of_different_conversations_never_match() -> None:
    turns = [record(c="a"), record(c="b"), record(c="a", turn=1, n=2048, h=[[0, 32]])]
    (first, second), (other,) = conversations(turns)
    assert second.chain[:2] == first.chain == (0, 1)
    assert second.chain[2:] == (2, 3) and other.chain == (4, 5)


def test_ids_match_where_the_file_says_so_and_the_common_prefix_is_fixed() -> None:
    turns = [
        record(c="a", scope="file", h=[[0, 32]], n=2048),
        record(c="b", scope="file", h=[[0, 16], [70, 16]], n=2048),
        record(c="b", agent="other", scope="file", h=[[0, 8], [200, 8]], n=1024),
    ]
    (first,), (second, other) = conversations(turns)
    assert (first.chain, second.chain, other.chain) == ((0, 1, 2, 3), (0, 1, 4, 5), (0, 6))
    assert [turn.fixed_blocks for turn in (first, second, other)] == [2, 2, 2]


def test_tools_and_system_prompts_of_the_same_size_are_shared() -> None:
    sizes = {"n": 2048, "h": [[0, 32]], "tools": 1000, "system": 600}
    first, same, other = conversations(
        [record(c="a", **sizes), record(c="b", **sizes), record(c="c", **{**sizes, "system": 700})]
    )
    # Blocks end at 512, 1024 (system prompt, as its last fine block is), 1536, 2048.
    assert (first[0].chain, same[0].chain) == ((0, 1, 2, 3), (0, 1, 2, 4))
    assert other[0].chain[0] == 0 and len({*other[0].chain[1:], *first[0].chain}) == 7
    assert [turn.fixed_blocks for (turn,) in (first, same, other)] == [3, 3, 3]


def test_what_a_session_s_first_request_fixes_holds_for_its_later_ones() -> None:
    turns = [record(c=c, turn=turn, tools=512 * (turn + 1), system=0) for c in "ab" for turn in (0, 1)]
    found = [turn for one in conversations(turns) for turn in one]
    assert [turn.chain for turn in found] == [(0, 1), (0, 1), (0, 2), (0, 2)]
    assert [turn.fixed_blocks for turn in found] == [1, 1, 1, 1]


# arrivals -------------------------------------------------------------------------------------------------------------


def conversation(name: str, *times: float) -> Conversation:
    turns = [record(c=name, s=name, t=at, turn=turn, tools=512) for turn, at in enumerate(times)]
    return conversations(turns)[0]


def test_gaps_are_cut_beyond_the_server_s_own_time() -> None:
    arrivals = compose([conversation("a", 0.0, 5.0, 105.0)], live=1, cap=10.0, limit=3)
    start = arrivals[0].at
    assert 0 <= start < 300
    assert [one.at - start for one in arrivals] == pytest.approx([0.0, 5.0, 5.0 + 10.0 + 2.0])


def test_a_slot_goes_on_with_a_copy_that_shares_only_what_is_fixed() -> None:
    arrivals = compose([conversation("a", 0.0, 5.0)], live=1, cap=60.0, limit=4)
    assert [one.session for one in arrivals] == ["a#0", "a#0", "a#1", "a#1"]
    first, copy = arrivals[0].chain, arrivals[2].chain
    assert first[0] == copy[0] and not set(first[1:]) & set(copy[1:])
    assert 1 <= arrivals[2].at - (arrivals[1].at + 2.0) <= 60
    assert len(compose([conversation("a", 0.0)], live=2, cap=1.0, limit=100)) == 100, "as many copies as it takes"


def test_so_many_conversations_run_at_once_and_a_limit_only_cuts() -> None:
    many = [conversation(f"c{at}", 0.0, 50.0, 100.0) for at in range(7)]
    arrivals, short = (compose(many, live=3, cap=3600.0, limit=limit) for limit in (60, 20))
    assert [one.at for one in arrivals] == sorted(one.at for one in arrivals)
    for now in (one.at for one in arrivals):
        begun = {one.session for one in arrivals if one.at <= now}
        going = [name for name in begun if any(one.at + 2.0 >= now for one in arrivals if one.session == name)]
        assert len(going) <= 3
    assert [(one.at, one.session, one.chain) for one in arrivals[:20]] == [(o.at, o.session, o.chain) for o in short]


def test_the_order_follows_the_seed() -> None:
    many = [conversation(f"c{at}", 0.0) for at in range(9)]
    order = list(range(9))
    random.Random(4).shuffle(order)
    arrivals = compose(many, live=1, cap=1.0, seed=4, limit=9)
    assert [one.session for one in arrivals] == [f"c{at}#0" for at in order]


def test_traffic_of_many_users_is_replayed_as_recorded(tmp_path: Path) -> None:
    (found,) = conversations([record(s=f"u{at % 2}", t=float(at)) for at in range(4)])
    assert is_traffic([found]) and not is_traffic([found, found])
    assert not is_traffic(conversations([record(s="a"), record(s="b", parent="a")]))
    (whole,) = traffic_of([found], SessionBenchSettings(requests=3))
    assert [(one.at, one.session) for one in whole.arrivals] == [(0, "u0"), (1, "u1"), (2, "u0")]
    lines = [{**MOONCAKE, "timestamp": 1000 * at, "hash_ids": [0, at, 100]} for at in range(1, 9)]
    traces = load_traces([write(tmp_path / "m.jsonl.gz", lines)])
    (whole,) = traffic_of(traces["m"], SessionBenchSettings(requests=6))
    assert (whole.live, len(whole.arrivals), whole.working_set) == (RECORDED, 6, 8)
    assert [whole.capacity(share) for share in (0.01, 0.25, 1.0)] == [1, 2, 8]


@given(traffic())
def test_the_working_set_is_the_mean_of_live_prompts(arrivals: list[Arrival]) -> None:
    totals = []
    for at, now in enumerate(one.at for one in arrivals):
        last = {one.session: len(one.chain) for one in arrivals[: at + 1]}
        live = [one.session for one in arrivals if one.at >= now]
        totals.append(sum(size for session, size in last.items() if session in live))
    counted = totals[len(totals) // 5 :]
    assert working_set(arrivals) == pytest.approx(sum(counted) / len(counted))
