"""The probe sees what there is to see, and between tenants there is nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.tenant_probe import (
    VOCABULARY,
    Ask,
    auc,
    both,
    is_time,
    over_http,
    probe,
    read_by_agents,
    serving,
    without_model,
)
from tests.engine.local.conftest import engine_of, tiny_model

SCORED = st.lists(st.tuples(st.booleans(), st.integers(0, 5)), min_size=1, max_size=30)


@given(SCORED)
def test_the_area_is_the_share_of_pairs_in_order(scored: list[tuple[bool, int]]) -> None:
    labels, scores = zip(*scored, strict=True)
    pairs = [(a, b) for label, a in scored if label for other, b in scored if not other]
    share = sum((a > b) + 0.5 * (a == b) for a, b in pairs) / len(pairs) if pairs else 0.5
    assert auc(labels, scores) == pytest.approx(max(share, 1 - share))


@pytest.fixture(scope="module")
def ask() -> Iterator[Ask]:
    with (
        engine_of(tiny_model("llama")) as engine,
        serving(engine) as url,
        httpx.Client(base_url=url, timeout=60) as http,
    ):
        yield over_http(http)


def test_a_spy_with_the_victims_key_sees_everything(ask: Ask) -> None:
    seen = probe(ask, "twin", 30, 200)
    assert seen["tokens.device"] == seen["tokens.computed"] == 1.0


def test_another_tenants_receipts_tell_nothing_at_all(ask: Ask) -> None:
    seen = probe(ask, "spy", 60, 200, seed=random.randrange(2**32))
    exact = {name: area for name, area in seen.items() if name.startswith("tokens.") or name == "misses"}
    assert set(exact.values()) == {0.5}, exact
    assert seen["first_chunk"] < 0.85, "60 times are too few for more; the script takes 1,000"


def test_what_is_found_in_plain_traffic_tells_a_tenant_of_its_own_texts_only() -> None:
    """A thousand trials, all of counts: the figures are the same in every run."""
    found = both(without_model(), 1000, read_by_agents(VOCABULARY))
    assert max(found["other_tenant"].values()) <= 0.55, found["other_tenant"]
    assert min(found["same_tenant"][name] for name in ("report.shared_tokens", "answers_read")) > 0.95, "it works"
    assert not any(map(is_time, found["other_tenant"]))
