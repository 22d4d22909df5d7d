"""What one rank has learned, kept in a folder: loaded at the start, written by a thread of its own and at the end.

A worker's connector does not see the weights, so the model is identified by samples of their files.
"""

from __future__ import annotations

import hashlib
import json
import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.distributed.parallel_state import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

from kedge.engine.common.state.files import identity_of
from kedge.engine.common.state.snapshot import EngineState, SavedState
from kedge.errors import ConfigError, StateRefused
from kedge.kv.segment import KVSegment
from kedge.settings import AnchorSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig


logger = logging.getLogger(__name__)
OUTCOMES = ("saved", "failed", "refused", "damaged")
"""What is counted: snapshots that were written, or could not be; state of another model; damaged files"""
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
SAMPLES, SAMPLE_BYTES = 1024, 4096
"""Evenly spaced samples of every file of weights, and the size of one: a smaller file is read whole"""
_CHANCE = frozenset({"_name_or_path", "dtype", "torch_dtype", "transformers_version"})
"""Config entries that do not identify the model"""


class RankState:
    """The saved state of one rank, or of the guard beside them. Its thread holds up a step only while it looks at what
    there is to be written.

    A snapshot that fails is logged and counted, and the one before stays.
    """

    def __init__(self, state: EngineState, interval: float, is_trusted: Callable[[], bool]) -> None:
        """Write every `interval` seconds what `state` asks for, where `is_trusted` returns that it is worth keeping."""
        self._state, self._interval, self._is_trusted = state, interval, is_trusted
        self._outcomes: Counter[str] = Counter()
        self._lock, self._ending = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._every, name="kedge-state", daemon=True)

    def load(self) -> bool:
        """Load the last snapshot. Returns whether it had anything.

        Damaged files are counted and logged, and the rest is loaded; state of another model, or of another
        rank, is refused, and the first snapshot moves it away. Raises `ConfigError` where the folder cannot be used.
        """
        try:
            found = self._state.load()
        except StateRefused as refusal:
            self._count("refused")
            logger.error("kedge: nothing is learned yet, the saved state is refused: %s", refusal)
            return False
        except OSError as error:
            raise ConfigError("state", str(self._state.folder), f"cannot be used: {error}") from error
        self._count("damaged", len(found.damaged))
        logger.info("kedge: loaded %s", _summary(found, self._state.folder))
        return found.pools + found.templates + found.values > 0

    def start(self) -> None:
        """Start the thread that writes snapshots."""
        self._thread.start()

    def close(self) -> None:
        """Write the last snapshot, and give the folder back. Idempotent."""
        if self._ending.is_set():
            return
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join()
        self.save()
        self._state.close()

    def take_outcomes(self) -> dict[str, int]:
        """Return what was counted since the last call, by the names of `OUTCOMES`."""
        with self._lock:
            outcomes, self._outcomes = self._outcomes, Counter()
        return dict(outcomes)

    def save(self) -> None:
        """Write a snapshot, if there is anything that is trusted."""
        if not self._is_trusted():
            return
        try:
            saved = self._state.save()
        except Exception:  # whatever it is, the engine goes on and the snapshot before stays
            self._count("failed")
            logger.exception("kedge: no snapshot of what was learned")
        else:
            self._count("saved")
            logger.debug("kedge: saved %s", _summary(saved, self._state.folder))

    def _every(self) -> None:
        while not self._ending.wait(self._interval):
            self.save()

    def _count(self, outcome: str, times: int = 1) -> None:
        if times:
            with self._lock:
                self._outcomes[outcome] += times


def _summary(state: SavedState, folder: Path) -> str:
    counts = f"{state.pools} pools, {state.templates} templates and {state.values} values"
    return f"{counts}, {state.nbytes / 2**20:.1f} MiB in {state.seconds * 1e3:.0f} ms ({folder})"


def rank_folder(state: Path, config: VllmConfig) -> Path:
    """Return the folder of this rank's part of saved state: each replica and each of its ranks has its own."""
    replica = config.parallel_config.data_parallel_index
    return state.absolute() / f"replica-{replica}" / f"rank-{get_tensor_model_parallel_rank()}"


def rank_identity(config: VllmConfig, like: KVSegment, anchors: AnchorSettings) -> str:
    """Return what saved KV of this rank depends on, part by part. `like` is KV of the rank's shape and dtype.

    How vLLM lays out its blocks is not among it: saved KV is by token, keys unrotated. Raises `ConfigError` where the
    model's files are not on this machine.
    """
    layers, _, kv_heads, head_dim = like.keys.shape
    return identity_of(
        {
            "backend": "vllm",
            "model": model_digest(config),
            "rope": _plain(config.model_config.hf_text_config.rope_parameters),
            "dtype": str(like.dtype),
            "layers": layers,
            "kv_heads": kv_heads,
            "head_dim": head_dim,
            "rank": get_tensor_model_parallel_rank(),
            "ranks": get_tensor_model_parallel_world_size(),
            "anchors": anchors.estimator,
        }
    )


def guard_identity(config: VllmConfig, anchors: AnchorSettings) -> str:
    """Return what saved records of the quality guard depend on. Raises `ConfigError` as `rank_identity` does."""
    return identity_of({"backend": "vllm", "model": model_digest(config), "anchors": anchors.estimator})


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
    """Yield bytes of a file: all of a small one, else `SAMPLES` evenly spaced pieces, with the first and the last."""
    last = file.stat().st_size - SAMPLE_BYTES
    with file.open("rb") as opened:
        if last < SAMPLES * SAMPLE_BYTES:
            yield opened.read()
            return
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
