"""What ranks have learned comes back after a restart of vLLM, and only to the engine that it is of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kedge.engine.common.state.files import MANIFEST, SUFFIX
from kedge.errors import ConfigError
from kedge.integrations.vllm.plugin.settings import SCHEDULER
from tests.integrations.vllm.conftest import Driver, driver, prompt, receipt, save_tiny_llama
from tests.integrations.vllm.test_translation import EXTRA, VALUES, hints, teach, teach_base_only, tokens

RANK = Path("replica-0", "rank-0")


@contextmanager
def engine(model: Path, state: Path, **more: Any) -> Iterator[Driver]:
    with driver(model, extra={**EXTRA, "state": str(state)}, scheduler_cls=SCHEDULER, **more) as built:
        yield built


REFUSED = "the saved state is refused"


def call(built: Driver, value: list[int], **more: Any) -> tuple[int, list[int]]:
    """Return how many tokens of a call were translated, and its answer."""
    output = built.ask(tokens(value), count=12, kedge=hints(value), **more)
    return receipt(output)["tokens"]["translated"], list(output.outputs[0].token_ids)


def team(built: Driver, fresh: int) -> list[int]:
    """Return the translated tokens of a team's calls: of questions that were asked before, and of one that is new."""
    built.reset()
    known = [call(built, value)[0] for value in VALUES[:2]]
    return [*known, receipt(teach_base_only(built, prompt(60, fresh)))["tokens"]["translated"]]


@pytest.fixture(scope="module")
def before(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[int], list[int]]:
    """The folder that a stopped engine has left, what it translated of a team's calls, and an answer of its own."""
    folder = tmp_path_factory.mktemp("state")
    with engine(tiny_llama, folder) as built:
        for value in VALUES[:-1]:
            assert receipt(teach(built, value))["tokens"]["translated"] == 0
        built.reset()
        translated, answer = team(built, 700), call(built, VALUES[0])[1]
    return folder, translated, answer


@pytest.fixture
def state(before: tuple[Path, list[int], list[int]], tmp_path: Path) -> Path:
    """Return a copy of the folder."""
    return Path(shutil.copytree(before[0], tmp_path / "state"))


def test_the_first_team_after_a_restart_is_translated_as_before(
    before: tuple[Path, list[int], list[int]], state: Path, tiny_llama: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _, translated, answer = before
    assert translated == [170] * 3
    with engine(tiny_llama, state) as built:
        assert call(built, VALUES[0]) == (170, answer), "the very first call"
        assert team(built, 701) == translated
        assert call(built, VALUES[0], salt="somebody else")[0] == 0, "tenants stay apart"
    assert REFUSED not in caplog.text and "damaged state" not in caplog.text


def test_another_model_of_the_same_shape_starts_with_nothing(
    state: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = save_tiny_llama(tmp_path / "other", initializer_range=0.1)
    with engine(other, state) as built:
        assert call(built, VALUES[0])[0] == 0 and REFUSED in caplog.text
        for value in VALUES[:-1]:
            teach(built, value)
    assert list((state / RANK / "refused-1").glob(f"*{SUFFIX}"))
    with engine(other, state) as built:
        assert call(built, VALUES[0])[0] == 170, "its own came after it"


def test_a_folder_in_use_is_refused(state: Path, tiny_llama: Path) -> None:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    with engine(tiny_llama, state) as built, pytest.raises(ConfigError, match="another process uses this folder"):
        get_kv_transfer_group()._keep_state(state, built.worker._learner.pages)


def rank_folders(state: Path) -> list[Path]:
    return [state / "replica-0" / f"rank-{rank}" for rank in range(2)]


def test_two_ranks_keep_their_own_parts(tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What one of them has lost is translated by none of them, and a part is no other number of ranks'."""
    parallel = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(tiny_llama, tmp_path, **parallel) as built:
        for value in VALUES[:-1]:
            teach(built, value)
        built.reset()
        before = call(built, VALUES[0])
        assert before[0] == 170
    one, other = (json.loads((folder / MANIFEST).read_bytes()) for folder in rank_folders(tmp_path))
    assert [entry["name"] for entry in one["entries"]] == [entry["name"] for entry in other["entries"]]
    assert one["entries"] != other["entries"], "each has the KV of its own heads"
    with engine(tiny_llama, tmp_path, **parallel) as built:
        assert call(built, VALUES[0]) == before
    for path in rank_folders(tmp_path)[1].glob(f"*{SUFFIX}"):
        path.write_bytes(b"")
    with engine(tiny_llama, tmp_path, **parallel) as built:
        assert call(built, VALUES[0])[0] == 0
    with engine(tiny_llama, tmp_path) as built:
        assert call(built, VALUES[0])[0] == 0 and REFUSED in caplog.text


def test_a_tenant_keeps_to_its_anchors_after_a_restart_too(tiny_llama: Path, tmp_path: Path) -> None:
    quotas = {"acme": {"anchor_bytes": "192KiB"}, "*": {"anchor_bytes": "384KiB"}}
    for turn in range(2):
        more = {**EXTRA, "state": str(tmp_path), "quotas": quotas}
        with driver(tiny_llama, extra=more, scheduler_cls=SCHEDULER) as built:
            for value in VALUES if turn == 0 else ():
                for salt in ("acme", "acme/part", "else"):
                    built.ask(tokens(value), kedge=hints(value), salt=salt)
            held: dict[str, int] = {}
            for key, pool in built.worker._learner.learned[0].pools.items():
                held[key.namespace.tenant] = held.get(key.namespace.tenant, 0) + pool.nbytes
            assert 0 < held["acme"] <= 192 << 10 < held["else"] <= 384 << 10
