"""The saved state of one rank: no step waits for a disk, and a model is known by its weights."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kedge.anchors.base_store import BaseStore
from kedge.anchors.store import AnchorStore
from kedge.engine.common.state import files, saving
from kedge.engine.common.state.snapshot import EngineState
from kedge.errors import ConfigError
from kedge.integrations.vllm.plugin import rank_state
from kedge.integrations.vllm.plugin.rank_state import SAMPLE_BYTES, SAMPLES, model_digest, samples
from kedge.integrations.vllm.plugin.requests import Orders
from kedge.integrations.vllm.plugin.worker_side import WorkerSide
from kedge.kv.segment import KVSegment
from kedge.reuse.costs import EngineCosts
from kedge.reuse.learning import LearningBudget
from kedge.settings import AnchorSettings
from kedge.types import Namespace, TenantId

PATIENCE = 60.0


def test_steps_go_on_while_a_snapshot_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    writing, go_on = threading.Event(), threading.Event()
    save_file = files.save_file

    def slow(*args: Any) -> None:
        writing.set()
        assert go_on.wait(PATIENCE)
        save_file(*args)

    monkeypatch.setattr(files, "save_file", slow)
    monkeypatch.setattr(saving, "SNAPSHOT_SECONDS", 0.01)
    anchors, bases, kv = (
        AnchorStore(AnchorSettings()),
        BaseStore(1 << 20),
        KVSegment(torch.ones(1, 3, 1, 2), torch.zeros(1, 3, 1, 2)),
    )
    learned = SimpleNamespace(anchors=anchors, bases=bases, is_learning=False, rotation=SimpleNamespace(refusal=None))
    learned.pages, learned.is_at_rest = SimpleNamespace(synchronize=lambda: None), False
    learned.learn = lambda: False
    side: Any = WorkerSide(16, 1.0, LearningBudget(is_timed=False), EngineCosts())
    side._learner = learned
    side.keep_state(EngineState(tmp_path, "identity", kv.slice(0, 0), side.ask, values=True))
    bases.put_content(Namespace(TenantId("a")), (1, 2, 3), (), kv)
    assert writing.wait(PATIENCE)
    for _ in range(3):
        side.begin_step()
        side.before_pass(Orders())
        side.after_pass(Orders())
        bases.put_content(Namespace(TenantId("a")), (4,), (), kv.slice(0, 1))
    go_on.set()
    side.close()
    found, new = BaseStore(1 << 20), AnchorStore(AnchorSettings())
    back = EngineState(tmp_path, "identity", kv.slice(0, 0), lambda question: question(new, found), values=True)
    assert back.load().values == 2, "that of the last save, when the rank was closed"
    back.close()


# the identity of a model ----------------------------------------------------------------------------------------------


def config(folder: Path, **other: Any) -> Any:
    shape = SimpleNamespace(to_dict=lambda: {"layers": 2, "_name_or_path": str(folder)}, rope_parameters={"theta": 1e4})
    own = {"model": str(folder), "revision": None, "quantization": None, "seed": 0, "hf_config": shape}
    model = SimpleNamespace(**{**own, "hf_text_config": shape, **other})
    load = SimpleNamespace(load_format="auto", download_dir=None)
    return SimpleNamespace(model_config=model, load_config=load, parallel_config=SimpleNamespace(data_parallel_index=1))


def test_a_model_is_its_weights_and_not_its_name(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(bytes(range(200)))
    assert model_digest(config(one)) == model_digest(config(other))
    assert model_digest(config(one)) != model_digest(config(one, quantization="fp8"))
    (other / "model.safetensors").write_bytes(bytes(range(1, 201)))
    assert model_digest(config(one)) != model_digest(config(other))


def test_a_model_without_files_has_no_identity(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no weights are in"):
        model_digest(config(tmp_path))
    with pytest.raises(ConfigError, match="not on this machine"):
        model_digest(config(Path("nobody/has-this-model")))


def test_a_folder_that_is_in_use_or_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    kept = rank_state.open_state(tmp_path / "kept", config(tmp_path), AnchorSettings())
    with pytest.raises(ConfigError, match="another process uses this folder"):
        rank_state.open_state(tmp_path / "kept", config(tmp_path), AnchorSettings())
    with pytest.raises(ConfigError, match="cannot be used"):
        rank_state.open_state(tmp_path / "model.safetensors", config(tmp_path), AnchorSettings())
    kept.close()


def test_large_files_are_sampled_from_the_first_byte_to_the_last(tmp_path: Path) -> None:
    size, file, seen = (SAMPLES + 5) * SAMPLE_BYTES, tmp_path / "weights", []
    for written in (None, 0, size - 1):
        with file.open("wb") as opened:
            opened.truncate(size)
            if written is not None:
                opened.seek(written)
                opened.write(b"x")
        seen.append(b"".join(samples(file)))
    assert len(seen[0]) == SAMPLES * SAMPLE_BYTES and len(set(seen)) == 3


def test_a_refusal_can_name_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    ranks = {"get_tensor_model_parallel_rank": 1, "get_tensor_model_parallel_world_size": 2}
    for name, value in ranks.items():
        monkeypatch.setattr(rank_state, name, lambda value=value: value)
    like = KVSegment(*[torch.empty(3, 0, 2, 8, dtype=torch.bfloat16)] * 2)
    found = rank_state.identity(config(tmp_path), AnchorSettings(), like)
    assert model_digest(config(tmp_path)) in found
    for key, part in {"rank": 1, "ranks": 2, "dtype": '"torch.bfloat16"', "layers": 3, "kv_heads": 2}.items():
        assert f'"{key}": {part}' in found
    assert rank_state.rank_folder(tmp_path, config(tmp_path)) == tmp_path / "replica-1" / "rank-1"
