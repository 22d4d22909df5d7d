import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kedge.anchors.base_store import BaseStore
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


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("sccptffe"), st.integers(0, 1), st.integers(1, 4)), max_size=60))
def test_it_is_a_dict_of_what_was_used_last_within_its_bytes(steps: list[tuple[str, int, int]]) -> None:
    store, twin = BaseStore(9 * ONE), dict[tuple[str, int, int], int]()

    def use(key: tuple[str, int, int], size: int) -> None:
        twin.pop(key, None)
        twin[key] = size
        while sum(twin.values()) > 9:
            del twin[next(iter(twin))]

    for step, name, size in steps:
        run, content = run_key(str(name)), (name,) * size
        if step == "s":
            kept(store, size, run)
            use(("s", name, 0), size)
        elif step == "c":
            store.put_content(SPACE, content, (5,), random_kv(size, 1))
            use(("c", name, size), size)
        elif step == "p":
            store.put_prefix(SPACE, str(name), 1, random_kv(size, 1))
            use(("p", name, 0), size)
        elif step == "t":
            store.put_shared_text(run, (7, *range(size)), random_kv(size, 1), "reader")
            if ("t", name, size) not in twin:
                use(("t", name, size), size)
        elif step == "f":
            assert store.find(run, SampleId.parse("q"), content, ()) is None, "behind other tokens"
            found = store.find(run, SampleId.parse("q"), content, (5,))
            assert (found is not None) == (("c", name, size) in twin)
            if found:
                use(("c", name, size), size)
        else:
            store.end_run(run)
            twin = {key: held for key, held in twin.items() if key[0] not in "st" or key[1] != name}
        store.check_integrity()
        stats = store.stats()
        assert (stats.values + stats.templates, stats.nbytes) == (len(twin), sum(twin.values()) * ONE)
    store.clear()
    assert store.stats().nbytes == 0


def test_a_view_does_not_keep_the_whole_alive() -> None:
    store = BaseStore(100 * ONE)
    store.put_content(SPACE, (1,), (), random_kv(64, 1).slice(3, 4))
    entry = store.find(RUN, SAMPLE, (1,), ())
    assert entry.kv.keys.untyped_storage().nbytes() * 2 == ONE


def test_no_room_at_all_is_refused() -> None:
    with pytest.raises(ConfigError, match="anchors.max_base_bytes=0"):
        BaseStore(0)
