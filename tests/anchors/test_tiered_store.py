"""Units between device and host: who goes, who comes, and that nothing is lost or changed on the way."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kedge.anchors.base_store import BaseStore
from kedge.anchors.store import AnchorStore
from kedge.anchors.tiered_store import HostBound, Offloadable, TieredStore
from kedge.cache import steps_to_execution
from kedge.errors import PlanError
from kedge.reuse.contracts import Owner, PlaceholderSite, TemplateOwner
from kedge.settings import AnchorSettings
from kedge.types import Namespace, RunId, RunKey, SampleId, TenantId
from tests.anchors.helpers import SLOT, observe, plus, random_kv, sample

SPACE = Namespace(TenantId("tenant"))


def run_key(name: str) -> RunKey:
    return RunKey(SPACE, "", RunId(name))


OPEN = {"min_anchors": 1, "max_error": 1e9, "weak_error": 1e9}


class Piece(Offloadable):
    """A unit of some bytes, whose owner is its name."""

    def __init__(self, name: str, size: int) -> None:
        self.data = torch.full((size,), ord(name), dtype=torch.uint8)
        self.owner = run_key(name)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def device(self) -> torch.device:
        return self.data.device

    def place(self, put: Callable[[Tensor], Tensor]) -> None:
        self.data = put(self.data)


class World:
    """A store of pieces with steps that a test sets."""

    def __init__(self, device: int, host: int, *sizes: int, window: float = 2.0) -> None:
        self.steps: dict[Owner | None, float] = {}
        self.pieces = [Piece("abcdefgh"[at], size) for at, size in enumerate(sizes)]
        bound = HostBound(host, steps_to_execution(), lambda owner: self.steps.get(owner), window)
        self.residence = TieredStore(device, bound, lambda: self.pieces)
        for piece in self.pieces:
            self.residence.touch(piece)

    def settle(self) -> int:
        left = self.residence.settle(sum(piece.nbytes for piece in self.pieces))
        self.residence.check_integrity()
        return left

    def tell(self, **steps: float) -> None:
        self.steps = {run_key(name): step for name, step in steps.items()}
        self.residence.notice()

    @property
    def host(self) -> str:
        return "".join(chr(piece.data[0]) for piece in self.pieces if piece.on_host)


def test_whoever_runs_last_goes_to_the_host_first() -> None:
    world = World(20, 100, 10, 10, 10, 10)
    world.tell(a=1, b=5, c=0, d=3)
    assert world.settle() == 0
    assert world.host == "bd"
    told = world.residence.stats()
    assert (told.device_bytes, told.host_bytes, told.host_units) == (20, 20, 2)
    assert (told.offloaded, told.bytes_offloaded) == (2, 20)


def test_without_a_forecast_recency_decides() -> None:
    world = World(20, 100, 10, 10, 10)
    world.residence.touch(world.pieces[0])
    world.settle()
    assert world.host == "b"


def test_what_fits_neither_is_left_over() -> None:
    world = World(20, 15, 10, 10, 10, 10)
    assert (world.settle(), world.host) == (10, "a")
    assert World(20, 0, 10, 10, 10).settle() == 10


def test_a_demand_takes_the_place_of_whoever_runs_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.anchors.tiered_store.time", SimpleNamespace(perf_counter=partial(next, count())))
    world = World(20, 20, 10, 10, 10)
    world.settle()
    world.tell(a=1, b=2, c=9)
    assert world.residence.demand(world.pieces[0])
    assert world.host == "c"
    told = world.residence.stats()
    assert (told.demanded, told.bytes_loaded) == (1, 10)
    assert told.demand_s == 1, "from one look at the clock to the next"
    assert all((piece.data == ord(name)).all() for name, piece in zip("abc", world.pieces, strict=True))


def test_two_may_change_places_on_a_host_that_is_full() -> None:
    world = World(10, 10, 10, 10)
    world.settle()
    assert world.residence.demand(world.pieces[0])
    assert world.host == "b"
    world.residence.check_integrity()


def test_what_a_plan_reads_stays_even_if_a_demand_then_finds_no_room() -> None:
    world = World(20, 20, 10, 10, 10)
    world.settle()
    for piece in world.pieces[1:]:
        piece.pinned = True
    assert not world.residence.demand(world.pieces[0])
    assert world.host == "a"
    assert world.residence.stats().offloaded == 1


def test_nothing_moves_for_a_demand_that_could_not_be_met() -> None:
    world = World(30, 30, 30, 10, 10, 10)
    world.settle()
    world.pieces[3].pinned = True
    assert world.host == "a"
    assert not world.residence.demand(world.pieces[0])
    assert (world.host, world.residence.stats().offloaded) == ("a", 1)


def test_who_runs_next_is_fetched_in_the_place_of_those_who_run_strictly_later() -> None:
    world = World(20, 100, 10, 10, 10, 10)
    world.settle()
    assert world.host == "ab"
    world.tell(a=1, b=2, c=1, d=2)
    assert world.residence.due
    assert world.residence.fetch()
    assert world.host == "bd", "d runs later than a; c does not"
    assert not world.residence.fetch()
    assert not world.residence.due
    world.residence.demand(world.pieces[0])
    told = world.residence.stats()
    assert (told.completed, told.wasted, told.demanded) == (1, 0, 0)


def test_what_was_fetched_in_vain_is_counted() -> None:
    world = World(20, 100, 10, 10, 10)
    world.settle()
    world.tell(a=1, b=5, c=5)
    assert world.residence.fetch()
    world.tell(a=9)
    world.residence.demand(world.pieces[1])
    assert world.residence.stats().wasted == 1


@pytest.mark.parametrize(("window", "step"), [(-1.0, 0.0), (2.0, 3.0), (2.0, float("inf"))])
def test_nobody_is_fetched_from_beyond_the_window(window: float, step: float) -> None:
    world = World(20, 100, 10, 10, 10, window=window)
    world.settle()
    world.tell(a=step, b=50, c=50)
    assert not world.residence.fetch()


def test_books_that_are_wrong_are_noticed() -> None:
    world = World(20, 10, 10, 10)
    world.pieces[0].on_host = world.pieces[1].on_host = True
    with pytest.raises(PlanError, match="host_bytes"):
        world.residence.check_integrity()


@pytest.mark.parametrize("seed", range(20))
def test_random_moves_keep_the_bounds_and_the_data(seed: int) -> None:
    rng = random.Random(seed)
    world = World(40, 60, *(rng.randint(1, 20) for _ in range(8)))
    names = "abcdefgh"
    left = world.settle()
    for _ in range(60):
        piece = rng.choice(world.pieces)
        match rng.randrange(4):
            case 0:
                world.tell(**{name: float(rng.randrange(5)) for name in rng.sample(names, 3)})
            case 1:
                assert world.residence.demand(piece) == (not piece.on_host)
            case 2:
                world.residence.fetch()
            case _:
                piece.pinned = not (piece.pinned or piece.on_host)
        world.residence.check_integrity()
        assert world.residence.device_bytes <= 40 + left
        assert all((one.data == ord(name)).all() for name, one in zip(names, world.pieces, strict=True))


# the anchor store ---------------------------------------------------------------------------------------------------


SLOTS = [PlaceholderSite(f"flow/agent-{at}/x", 1) for at in range(4)]


def filled(host: int, device: int, steps: dict[str, float] | None = None, **settings: object) -> AnchorStore:
    """Four sites of one pool, each with the offsets of three values."""
    told = {TemplateOwner(SPACE, site.agent_key): (steps or {}).get(site.agent_key) for site in SLOTS}
    bound = HostBound(host, steps_to_execution(), lambda owner: told.get(owner))  # type: ignore[arg-type]
    store = AnchorStore(AnchorSettings(**{**OPEN, **settings, "max_bytes": device}), bound)  # type: ignore[arg-type]
    for site in SLOTS:
        for seed in (1, 40, 80):
            observe(store, sample(seed), site)
            store.check_integrity()
    return store


def observations(store: AnchorStore) -> int:
    return sum(len(offsets.holders) for offsets in store.table.sites())


def whole() -> tuple[int, int]:
    """Bytes of all offsets, and of the key vectors beside them."""
    told = filled(0, 1 << 30).stats()
    keys = filled(0, 1 << 30).table.key_bytes()
    return told.nbytes - keys, keys


def test_offsets_that_do_not_fit_the_device_are_estimated_with_all_the_same() -> None:
    offsets, keys = whole()
    plain, tiered = filled(0, 1 << 30), filled(1 << 30, keys + int(offsets * 0.6))
    assert tiered.stats().tiers.host_units >= 1
    assert observations(tiered) == observations(plain) == 12
    for _ in range(2):
        for site in SLOTS:
            asked = sample(500)
            for store in (plain, tiered):
                store.begin()
            mine, theirs = (store.estimate(site, asked) for store in (tiered, plain))
            assert mine.shareable
            assert torch.equal(mine.value_table.blend(mine.value), theirs.value_table.blend(theirs.value))
            assert torch.equal(mine.prefix_table.blend(mine.prefix), theirs.prefix_table.blend(theirs.prefix))
            tiered.check_integrity()
    told = tiered.stats().tiers
    assert told.demanded > 0
    assert told.device_bytes <= keys + int(offsets * 0.6)


def test_learning_goes_on_in_a_slot_that_was_on_the_host() -> None:
    offsets, keys = whole()
    store = filled(1 << 30, keys + int(offsets * 0.6))
    away = next(site for pool in store.pools.values() for site, one in pool.sites.items() if one.on_host)
    real = observe(store, sample(900), away)
    store.check_integrity()
    store.begin()
    estimate = store.estimate(away, sample(900))
    again = plus(sample(900).base, estimate.value_table.blend(estimate.value))
    assert torch.allclose(again.keys, real.keys, atol=2e-3)


def test_the_farthest_go_first_and_who_runs_next_comes_back() -> None:
    offsets, keys = whole()
    steps = {SLOTS[0].agent_key: 9.0, SLOTS[1].agent_key: 0.0, SLOTS[2].agent_key: 1.0, SLOTS[3].agent_key: 5.0}
    store = filled(1 << 30, keys + int(offsets * 0.8), steps)
    [pool] = store.pools.values()
    assert {site for site, one in pool.sites.items() if one.on_host} == {SLOTS[0]}
    told = {**steps, SLOTS[0].agent_key: 1.0}
    store._residence._host = HostBound(1 << 30, steps_to_execution(), lambda owner: told[owner.template])  # type: ignore[union-attr]
    store.notice()
    assert store.due
    assert store.fetch()
    assert {site for site, one in pool.sites.items() if one.on_host} == {SLOTS[3]}
    store.check_integrity()


def test_what_one_plan_reads_is_not_moved_by_its_next_estimate() -> None:
    offsets, keys = whole()
    store = filled(1 << 30, keys + int(offsets * 0.45) + 9000)  # so much does matching add to the key vectors
    store.begin()
    estimates = {site: store.estimate(site, sample(500)) for site in SLOTS}
    refused = {site: one for site, one in estimates.items() if not one.shareable}
    assert SLOTS[0] not in refused
    assert {one.reason for one in refused.values()} == {"its offsets find no room on the device"}
    assert not any(one.learnable for one in refused.values())
    for site in refused:
        store.begin()
        assert store.estimate(site, sample(500)).shareable


def test_without_host_memory_what_does_not_fit_is_forgotten() -> None:
    offsets, keys = whole()
    store = filled(0, keys + int(offsets * 0.6))
    told = store.stats()
    assert observations(store) < 12
    assert (told.tiers.host_units, told.tiers.offloaded) == (0, 0)
    assert told.nbytes <= keys + int(offsets * 0.6)


def test_what_fits_neither_tier_is_forgotten() -> None:
    offsets, keys = whole()
    store = filled(int(offsets * 0.3), keys + int(offsets * 0.4))
    told = store.stats()
    assert 0 < observations(store) < 12
    assert told.tiers.host_bytes <= int(offsets * 0.3)


# base KV ------------------------------------------------------------------------------------------------------------


ONE = random_kv(1, 0).nbytes


def base_store(device: int, host: int, steps: dict[str, float] | None = None) -> BaseStore:
    def told(owner: Any) -> float | None:
        return (steps or {}).get(owner.run_id if isinstance(owner, RunKey) else owner.template)

    return BaseStore(device * ONE, HostBound(host * ONE, steps_to_execution(), told))


def test_base_kv_goes_to_the_host_and_comes_back_as_it_was() -> None:
    store = base_store(10, 100)
    ids = tuple(range(4))
    for run in "abc":
        store.put_sample(
            run_key(run), SampleId.parse("s"), ids, random_kv(4, ord(run), layers=4), exact_lineage=run == "a"
        )
        store.check_integrity()
    assert store.stats().tiers.host_units == 1
    for run in "abc":
        entry = store.find(run_key(run), SampleId.parse("s"), ids, ())
        assert entry is not None
        assert torch.equal(entry.kv.keys, random_kv(4, ord(run)).keys)
        assert entry.exact_lineage is (run == "a")
        store.check_integrity()
    assert store.stats().tiers.demanded == 3


def test_values_of_runs_that_go_on_stay_and_a_template_that_is_needed_is_fetched() -> None:
    steps = {"a": 0.0, "b": 4.0, "template": 9.0}
    store = base_store(10, 100, steps)
    store.put_prefix(SPACE, "template", 1, random_kv(4, 1))
    for run in "ab":
        store.put_sample(run_key(run), SampleId.parse("s"), (1, 2, 3, 4), random_kv(4, 2), exact_lineage=True)
    assert [key[1] for key, one in store._entries.items() if one.on_host] == ["template"]
    steps["template"] = 1.0
    store.notice()
    assert store.due
    assert store.fetch()
    assert [key[0] for key, one in store._entries.items() if one.on_host] == [run_key("b")]
    store.put_prefix(SPACE, "template", 3, random_kv(1, 3))
    assert set(store.prefixes(SPACE, "template") or ()) == {1, 3}
    store.check_integrity()


def test_base_kv_that_fits_neither_tier_is_forgotten_by_age() -> None:
    store = base_store(4, 4)
    for run in "abc":
        store.put_sample(run_key(run), SampleId.parse("s"), (1, 2, 3, 4), random_kv(4, 2), exact_lineage=True)
        store.check_integrity()
    found = [store.find(run_key(run), SampleId.parse("s"), (1, 2, 3, 4), ()) for run in "abc"]
    assert [one is not None for one in found] == [False, True, True]
    store.end_run(run_key("b"))
    store.check_integrity()
    assert store.stats().values == 1


def test_slots_are_named_by_their_template() -> None:
    store = filled(0, 1 << 30)
    assert {one.owner for one in store.table.sites()} == {TemplateOwner(SPACE, site.agent_key) for site in SLOTS}
    assert SLOT not in SLOTS
