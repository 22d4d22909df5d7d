"""Whose saved state is whose: the folder of a rank, and what its KV depends on.

A worker's connector does not see the weights, so the model is identified by samples of their files.
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from kedge.engine.common.state.snapshot import AskLearned, EngineState
from kedge.errors import ConfigError
from kedge.kv.segment import KVSegment
from kedge.reuse.guard.guard import QualityGuard
from kedge.settings import AnchorSettings

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
SAMPLES, SAMPLE_BYTES = 1024, 4096
"""Evenly spaced samples of every file of weights, and the size of one"""
_CHANCE = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version"})
"""Config entries that do not identify the model"""


def rank_folder(state: Path, config: VllmConfig) -> Path:
    """Return the folder of this rank's part of saved state: each replica and each of its ranks has its own."""
    replica = config.parallel_config.data_parallel_index
    return state.absolute() / f"replica-{replica}" / f"rank-{get_tensor_model_parallel_rank()}"


def open_state(
    folder: Path,
    config: VllmConfig,
    anchors: AnchorSettings,
    like: KVSegment | None = None,
    ask: AskLearned | None = None,
    guard: QualityGuard | None = None,
) -> EngineState:
    """Open a folder for what this rank has learned, KV as `like`, or for the records of a guard. Raises `ConfigError`
    where it cannot be used, or the model's files are not on this machine.
    """
    try:
        return EngineState(folder, identity(config, anchors, like), like, ask, values=True, guard=guard)
    except OSError as error:
        raise ConfigError("state", str(folder), f"cannot be used: {error}") from error


def identity(config: VllmConfig, anchors: AnchorSettings, like: KVSegment | None = None) -> str:
    """Return what saved records of the quality guard depend on, part by part, or what this rank has learned: `like` is
    KV of its shape and dtype.

    How vLLM lays out its blocks is not among it: saved KV is by token, keys unrotated. Raises `ConfigError` where the
    model's files are not on this machine.
    """
    parts: dict[str, object] = {"backend": "vllm", "model": model_digest(config), "anchors": anchors.estimator}
    if like is not None:
        layers, _, kv_heads, head_dim = like.keys.shape
        parts |= {
            "rope": _plain(config.model_config.hf_text_config.rope_parameters),
            "dtype": str(like.dtype),
            "layers": layers,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "rank": get_tensor_model_parallel_rank(),
            "ranks": get_tensor_model_parallel_world_size(),
        }
    return json.dumps(parts, sort_keys=True)


def model_digest(config: VllmConfig) -> str:
    """Return a digest of the model's config and of samples of its weights. Raises `ConfigError` without files."""
    model, load = config.model_config, config.load_config
    shape = {name: value for name, value in model.hf_config.to_dict().items() if name not in _CHANCE}
    how = {"quantization": model.quantization, "load_format": load.load_format}
    if load.load_format == "dummy":
        how["seed"] = model.seed
    digest = hashlib.sha256(json.dumps([_plain(shape), _plain(how)], sort_keys=True).encode())
    for file in _weights(config):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        for sample in samples(file):
            digest.update(sample)
    return digest.hexdigest()


def samples(file: Path) -> Iterator[bytes]:
    """Yield `SAMPLES` evenly spaced pieces of a file, from the first to the last: of a small one they have all."""
    last = max(0, file.stat().st_size - SAMPLE_BYTES)
    with file.open("rb") as opened:
        for number in range(SAMPLES):
            opened.seek(last * number // (SAMPLES - 1))
            yield opened.read(SAMPLE_BYTES)


def _weights(config: VllmConfig) -> list[Path]:
    """Return the files of the model's weights. Raises `ConfigError` where there are none on this machine."""
    name = config.model_config.model
    try:
        if not (path := Path(name)).exists():
            from huggingface_hub import snapshot_download

            cache: Any = config.load_config.download_dir
            revision = config.model_config.revision
            path = Path(snapshot_download(name, revision=revision, cache_dir=cache, local_files_only=True))
        files = [path] if path.is_file() else sorted(file for kind in WEIGHTS for file in path.glob(kind))
    except (OSError, ValueError) as error:
        raise ConfigError("state", name, f"the files of the model are not on this machine: {error!s:.200}") from error
    if not files and config.load_config.load_format != "dummy":
        raise ConfigError("state", name, f"no weights are in {path}, by which saved KV is known to be this model's")
    return files


def _plain(data: object) -> object:
    """Return data as JSON has it."""
    return json.loads(json.dumps(data, sort_keys=True, default=str))
