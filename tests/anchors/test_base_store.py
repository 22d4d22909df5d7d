import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.anchors.base_store import BaseStore, ContentKey, PrefixKey
from kedge.errors import ConfigError
from kedge.types import Namespace, RunKey, SampleId
from tests.anchors.helpers import random_kv

SPACE = Namespace("t")
RUN, SAMPLE = RunKey(SPACE, "", "r"), SampleId.parse("agent_a@0")


def run_key(name: str, tenant: str = "t") -> RunKey:
    return RunKey(Namespace(tenant), "", name)


ONE = random_kv(1, 0).nbytes


def kept(store: BaseStore, tokens: int = 4, run: RunKey = RUN) -> tuple[int, ...]:
    ids = tuple(range(tokens))
    store.put_sample(run, SAMPLE, ids, random_kv(tokens, 1))
    return ids


def test_a_response_is_found_in_its_run_only() -> None:
    store = BaseStore(100 * ONE)
    tokens = kept(store)
    entry = store.find(RUN, SAMPLE, tokens, ())
    assert entry.tokens == tokens
    assert torch.equal(entry.kv.keys, random_kv(4, 1).keys)
    for where in ((run_key("r", "x"), SAMPLE), (run_key("x"), SAMPLE), (RUN, SampleId.parse("x"))):
        assert store.find(*where, tokens, ()) is None
    assert store.find(RUN, SAMPLE, (9, 9), ()) is None


def test_the_start_of_a_response_is_found_as_far_as_it_was_run_and_named_apart() -> None:
    store = BaseStore(100 * ONE)
    tokens = kept(store)
    whole, part = (store.find(RUN, SAMPLE, tokens[:n], ()) for n in (4, 3))
    assert part.kv.tokens == len(part.tokens) == 3
    assert part.key != whole.key
    kept(store)
    assert store.find(RUN, SAMPLE, tokens, ()).key != whole.key  # new base KV, new name
    store.put_sample(RUN, SAMPLE, (1, 2, 3, 4), random_kv(2, 1))
    found = [store.find(RUN, SAMPLE, (1, 2, 3, 4)[:n], ()) for n in (2, 3, 4)]
    assert [one.tokens if one else None for one in found] == [(1, 2), (1, 2), None], "one token at most has no KV"
    assert found[0].key == found[1].key, "it is the same base KV"


def test_a_response_serves_any_part_of_it_whatever_its_last_token_is() -> None:
    store, kv, answer = BaseStore(100 * ONE), random_kv(8, 1), (0, 1, 2, 2, 3, 1, 2, 4, 7)
    store.put_sample(RUN, SAMPLE, answer, kv)
    parts = {(2, 3, 1, 2): (3, 7), (1, 2, 4, 7): (5, 8), (1, 2, 4): (5, 8), (1, 2, 9): (1, 3), (4, 7): (7, 8)}
    for value, part in parts.items():
        found = store.find(RUN, SAMPLE, value, ())
        assert found.tokens == answer[slice(*part)] and torch.equal(found.kv.keys, kv.keys[:, slice(*part)])
        assert found.key != store.find(RUN, SAMPLE, answer[: len(found.tokens)], ()).key
    assert [store.find(RUN, SAMPLE, value, ()) for value in ((1, 2, 8, 9), (9, 1, 2), ())] == [None] * 3


def test_text_that_prompts_of_a_run_share_is_found_there_behind_the_same_text() -> None:
    store, kv = BaseStore(100 * ONE), random_kv(3, 1)
    store.put_shared_text(RUN, (9, 8, 1, 2, 3), kv, "one")
    found = store.shared_text(RUN, (9, 8, 1, 2, 3), 3, "two")
    assert found is not None and found.tokens == (1, 2, 3) and torch.equal(found.kv.keys, kv.keys)
    for run, text in ((run_key("x"), (9, 8, 1, 2, 3)), (RUN, (8, 1, 2, 3)), (run_key("r", "x"), (9, 8, 1, 2, 3))):
        assert store.shared_text(run, text, 3, "two") is None
    assert store.shared_text(RUN, (9, 8, 1, 2, 3), 4, "two") is None, "it is cut otherwise"
    assert store.lasting(values=True) == [] and store.stats().templates == 1
    store.end_run(RUN)
    assert store.shared_text(RUN, (9, 8, 1, 2, 3), 3, "two") is None and store.stats().nbytes == 0


def test_a_reader_starts_from_what_the_reader_before_it_has_left() -> None:
    """Also once later ones have, or checks of their calls leave it again: a check of its call starts where that did."""
    store, text = BaseStore(100 * ONE), (9, 1, 2)
    for number, reader in enumerate(("one", "two", "three", "two", "one")):
        store.put_shared_text(RUN, text, random_kv(2, number), reader)
    found = {reader: store.shared_text(RUN, text, 2, reader) for reader in ("one", "two", "three", "four")}
    assert {reader: one.reader for reader, one in found.items() if one} == {
        "two": "one", "three": "two", "four": "three"
    }  # fmt: skip
    assert found["three"] is not None and torch.equal(found["three"].kv.keys, random_kv(2, 1).keys), "the first one"
    assert store.stats().nbytes == 6 * ONE, "of every reader what it left first"
    store.check_integrity()
    store.end_run(RUN)
    assert store.stats().nbytes == 0 and store.shared_text(RUN, text, 2, "four") is None


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("sccptfffnle"), st.integers(0, 1), st.integers(1, 4)), max_size=60))
def test_it_keeps_what_runs_are_to_read_and_else_what_was_used_last(steps: list[tuple[str, int, int]]) -> None:
    store, twin, moved = BaseStore(9 * ONE, ONE, patience=2), dict[tuple[str, int, int], list[int]](), 0

    def use(key: tuple[str, int, int], size: int, *, holds: bool) -> None:
        nonlocal moved
        twin.pop(key, None)
        moved += size if holds else 0
        loose = [one for one, (_, until) in twin.items() if until <= moved]
        if sum(held for held, _ in twin.values()) + size - sum(twin[one][0] for one in loose) > 9:
            return
        while sum(held for held, _ in twin.values()) + size > 9:
            del twin[loose.pop(0)]
        twin[key] = [size, moved + 2 * 9 if holds else 0]

    for step, name, size in steps:
        run, content = run_key(str(name)), (name,) * size
        if step == "s":
            kept(store, size, run)
            use(("s", name, 0), size, holds=True)
        elif step == "c":
            store.put_content(SPACE, content, (5,), random_kv(size, 1))
            use(("c", name, size), size, holds=False)
        elif step == "p":
            store.put_prefix(SPACE, str(name), {at: random_kv(1, at) for at in range(size)})
            use(("p", name, 0), size, holds=True)
        elif step == "t":
            store.put_shared_text(run, (7, *range(size)), random_kv(size, 1), "reader")
            if ("t", name, size) not in twin:
                use(("t", name, size), size, holds=True)
        elif step == "f":
            assert store.find(run, SampleId.parse("q"), content, ()) is None, "behind other tokens"
            found = store.find(run, SampleId.parse("q"), content, (5,))
            assert (found is not None) == (("c", name, size) in twin)
            if found:
                twin["c", name, size] = twin.pop(("c", name, size))
        elif step in "nl":
            store.note_read(run, SampleId.parse("q"), content, (5,), is_last=step == "l")
            if twin.pop(("c", name, size), None):
                twin["c", name, size] = [size, 0 if step == "l" else moved + 2 * 9]
                moved += size
        else:
            store.end_run(run)
            twin = {key: held for key, held in twin.items() if key[0] not in "st" or key[1] != name}
            twin |= {key: [held, 0] for key, (held, _) in twin.items() if key[:2] == ("c", name)}
        store.check_integrity()
        stats = store.stats()
        assert (stats.values + stats.templates, stats.nbytes) == (len(twin), sum(h for h, _ in twin.values()) * ONE)
    store.clear()
    assert store.stats().nbytes == 0


def question(number: int) -> ContentKey:
    return ContentKey(SPACE, (number,) * 4, ())


def test_room_is_for_the_runs_that_have_begun() -> None:
    """With room for two questions, all three would be dropped before they are read again."""
    store, runs = BaseStore(8 * ONE, ONE), [run_key(str(number)) for number in range(3)]
    held = [store.hold(question(number), 4, run) for number, run in enumerate(runs)]
    assert held == [True, True, False] and store.stats().nbytes == 8 * ONE
    assert [store.is_expected(question(number)) for number in range(3)] == held
    assert store.find(runs[0], SAMPLE, (0,) * 4, ()) is None and store.lasting(values=True) == []
    assert store.stored(question(0)) is None, "a snapshot has nothing to save"
    for number in range(3):
        store.put_content(SPACE, (number,) * 4, (), random_kv(4, number), runs[number])
    assert [key.tokens[0] for key in store.lasting(values=True)] == [0, 1]
    store.end_run(runs[0])
    assert store.find(runs[0], SAMPLE, (0,) * 4, ()), "it stays as long as nobody needs the room"
    assert store.hold(question(2), 4, runs[2]) and store.find(runs[0], SAMPLE, (0,) * 4, ()) is None
    store.end_run(runs[2])
    assert store.is_expected(question(2)), "other runs may wait for it"
    assert store.hold(question(3), 4, runs[0]) and not store.is_expected(question(2))
    store.check_integrity()


def test_what_has_been_read_for_the_last_time_makes_room_and_what_nobody_goes_on_to_read_in_the_end() -> None:
    store, runs = BaseStore(8 * ONE, ONE), [run_key(str(number)) for number in range(3)]
    for number in range(2):
        store.put_content(SPACE, (number,) * 4, (), random_kv(4, number), runs[number])
    store.note_read(runs[1], SAMPLE, (1,) * 4, (), is_last=True)
    store.note_read(runs[0], SAMPLE, (0,) * 4, (), is_last=False)
    assert store.hold(question(2), 4, runs[2])
    assert [key.tokens[0] for key in store.lasting(values=True)] == [0]
    store = BaseStore(4 * ONE, ONE, patience=3)
    assert store.hold(question(0), 4, runs[0])
    assert [store.hold(question(1), 4, runs[1]) for _ in range(3)] == [False, False, True]


def test_a_tenant_with_less_than_its_share_takes_the_room_that_others_hold_beyond_theirs() -> None:
    store, other = BaseStore(8 * ONE, ONE), run_key("r", "other")
    assert [store.hold(question(number), 2, RUN) for number in range(5)] == [True] * 4 + [False]
    theirs = [ContentKey(other.namespace, (number,), ()) for number in range(3)]
    assert [store.hold(one, 2, other) for one in theirs] == [True, True, False]
    assert [store.is_expected(question(number)) for number in range(4)] == [False, False, True, True]
    assert not store.hold(question(0), 2, RUN)


def test_of_a_text_what_the_last_reader_has_left_is_held() -> None:
    store, text = BaseStore(4 * ONE, ONE), (9, 1, 2)
    for number, reader in enumerate(("one", "two", "three")):
        store.put_shared_text(RUN, text, random_kv(2, number), reader)
    assert store.shared_text(RUN, text, 2, "two") is None, "the first reader's made room"
    assert store.shared_text(RUN, text, 2, "four").reader == "three"
    store.put_shared_text(RUN, (9, *range(5)), random_kv(5, 1), "one")
    assert store.shared_text(RUN, (9, *range(5)), 5, "two") is None, "there is no room for it"


def test_room_for_a_template_is_no_runs_and_there_is_some() -> None:
    store = BaseStore(8 * ONE, ONE)
    assert store.hold(key := PrefixKey(SPACE, "flow/agent"), 4, None) and store.prefixes(*key) is None
    store.end_run(RUN)
    assert store.is_expected(key)
    store.put_prefix(*key, {1: random_kv(4, 1)})
    assert store.prefixes(*key) and not store.hold(question(1), 8, RUN)
    with pytest.raises(ConfigError, match="anchors.max_base_bytes=0"):
        BaseStore(0)


def test_a_view_does_not_keep_the_whole_alive() -> None:
    store = BaseStore(100 * ONE)
    store.put_content(SPACE, (1,), (), random_kv(64, 1).slice(3, 4))
    assert store.find(RUN, SAMPLE, (1,), ()).kv.keys.untyped_storage().nbytes() * 2 == ONE
