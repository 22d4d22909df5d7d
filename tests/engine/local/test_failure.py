"""`Engine.failure` of the embedded engine."""

from __future__ import annotations

import pytest

from kedge.errors import EngineClosed
from tests.engine.local.conftest import engine_of, tiny_model
from tests.engine.local.test_translation import request, tokens

BOOM = RuntimeError("boom")


def boom() -> None:
    raise BOOM


def test_an_engine_that_works_or_was_closed_has_no_failure() -> None:
    with engine_of(tiny_model("llama")) as engine:
        engine.submit(request(tokens(1, 30))).result(60)
        assert engine.failure is None
    assert engine.failure is None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_what_ends_the_engines_thread_is_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(tiny_model("llama"))
    monkeypatch.setattr(engine._thread, "_next_step", boom)
    with pytest.raises(EngineClosed):
        engine.submit(request(tokens(1, 30))).result(60)
    assert engine.failure is BOOM
    engine.close()
    assert engine.failure is BOOM
