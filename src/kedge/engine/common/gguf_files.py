"""GGUF files, read through Transformers and written as the folders that it saves.

Transformers leaves out what it has no name for. Where the file tells such a value it is put into the config; where a
value or a tensor has no place the file is refused, since the model would answer, and answer wrongly.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils.logging import disable_progress_bar, enable_progress_bar, is_progress_bar_enabled

from kedge.errors import CorruptWeights, ModelError, UnsupportedModel
from kedge.models import require_gguf

VALUES = {
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
"""Values of GGUF -> their names in a config"""
FREQUENCIES = "rope_freqs.weight"
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
"""Tensors of rotary embeddings: what `llama3` and `longrope` divide the frequencies by"""
ENDS = ("eos", "eot", "eom")
"""Tokens that end an answer"""


class GGUFFile:
    """A GGUF file whose header was read. Raises `ConfigError` where a package is missing, and `CorruptWeights`."""

    def __init__(self, path: Path) -> None:
        require_gguf(path)
        import gguf

        self.path = path
        self._source = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        try:
            self._reader = gguf.GGUFReader(str(path))
            fields = self._reader.fields
            single = {name: one.contents() for name, one in fields.items() if one.types[0] != gguf.GGUFValueType.ARRAY}
            self.tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        except Exception as error:  # the reader checks nothing: a cut header raises whatever it meets first
            raise CorruptWeights("model", str(path), f"is no GGUF file, or is cut: {error}") from error
        self.architecture = str(single.get("general.architecture"))
        begin = self.architecture + "."
        self.values: Mapping[str, Any] = {name.removeprefix(begin): value for name, value in single.items()}

    @property
    def is_float32(self) -> bool:
        """Whether all weights are stored in float32."""
        return all(tensor.tensor_type.name == "F32" for tensor in self.tensors.values())

    def config(self) -> PretrainedConfig:
        """Return the model's config. Raises `UnsupportedModel`."""
        with self._reading("Transformers cannot read it"):
            return self._completed(AutoConfig.from_pretrained(**self._source, trust_remote_code=False))

    def convert(self, folder: Path, dtype: torch.dtype) -> None:
        """Write config, weights, tokenizer and generation config to `folder`, and show a progress bar meanwhile.

        Raises `CorruptWeights`, `UnsupportedModel` or, while it writes, what Transformers raises.
        """
        if "tokenizer.ggml.tokens" not in self._reader.fields:
            raise UnsupportedModel("model", str(self.path), "has no tokenizer in it")
        with self._reading("Transformers cannot read its tokenizer"):
            tokenizer: Any = AutoTokenizer.from_pretrained(**self._source, trust_remote_code=False)
        config = self.config()
        with self._reading("its weights do not fit", CorruptWeights):
            packed: Any = getattr(transformers, "GgufConfig", None)
            options = {"quantization_config": packed(dequantize=True)} if packed else {}
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **self._source, **options, config=config, dtype=dtype, output_loading_info=True, trust_remote_code=False
            )
        model, report = loaded
        if missing := sorted(report["missing_keys"]):
            raise CorruptWeights("model", str(self.path), f"lacks {missing[0]} and {len(missing) - 1} more")
        self._require_all_placed(model)
        model.config.__dict__.pop("quantization_config", None)
        model.hf_quantizer, model.is_quantized = None, False
        ends = {self.values.get(f"tokenizer.ggml.{name}_token_id") for name in ENDS} - {None}
        model.generation_config.eos_token_id = sorted(ends) or model.generation_config.eos_token_id
        with without_bars():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)

    @contextmanager
    def _reading(self, why: str, error_type: type[Exception] = UnsupportedModel) -> Iterator[None]:
        """Name what Transformers raises, and let it parse the file's header and tensor names once, not at each call."""
        import gguf

        before: Any = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader, gguf.get_tensor_name_map = (lambda *_: self._reader), cache(before[1])  # type: ignore
        try:
            with without_bars():
                yield
        except ModelError:
            raise
        except Exception as error:
            reason = str(error).strip() or type(error).__name__
            raise error_type("model", str(self.path), f"{why} (architecture {self.architecture}): {reason}") from error
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = before  # type: ignore

    def _completed(self, config: PretrainedConfig) -> PretrainedConfig:
        """Return the config with the values that Transformers has left out."""
        text: Any = config.get_text_config()
        for name in VALUES.keys() & self.values.keys():
            if hasattr(text, own := VALUES[name]) and not hasattr(text, "global_head_dim"):
                setattr(text, own, self.values[name])
            elif own != "head_dim":  # shapes tell that one
                why = f"{name} has no place in Transformers' {text.model_type}"
                raise UnsupportedModel("model", str(self.path), why)
        if (text.pad_token_id or 0) >= text.vocab_size:  # a default of the architecture
            text.pad_token_id = None
        if hasattr(text, "query_pre_attn_scalar"):  # as llama.cpp: by the head, but in the models of 27B
            per_head = text.hidden_size // text.num_attention_heads
            text.query_pre_attn_scalar = per_head if text.num_hidden_layers in (46, 62) else text.head_dim
        if rope := self._rope():
            text.rope_parameters.get("full_attention", text.rope_parameters).update(rope)
            if hasattr(text, "original_max_position_embeddings"):  # Phi's own, which goes before
                text.original_max_position_embeddings = rope.get("original_max_position_embeddings")
        if FREQUENCIES in self.tensors:
            self._require_frequencies(text)
        return config

    def _rope(self) -> dict[str, Any]:
        """Return the parameters of scaled rotary embeddings. Raises `UnsupportedModel` for a kind that is not known."""
        kind, factor = (self.values.get(f"rope.scaling.{name}") for name in ("type", "factor"))
        original = self.values.get("rope.scaling.original_context_length")
        lengths = {} if original is None else {"original_max_position_embeddings": original}
        if LONG in self.tensors:
            factors = {"short_factor": self._floats(SHORT).tolist(), "long_factor": self._floats(LONG).tolist()}
            return {"rope_type": "longrope", **factors, **lengths}
        if FREQUENCIES in self.tensors:
            bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
            return {"rope_type": "llama3", "factor": float(self._floats(FREQUENCIES).max()), **bands}
        if kind in (None, "none"):
            return {}
        if kind in ("linear", "yarn"):
            return {"rope_type": kind, "factor": factor, **(lengths if kind == "yarn" else {})}
        raise UnsupportedModel("model", str(self.path), f"rotary embeddings scaled as {kind!r} are not known")

    def _require_frequencies(self, text: PretrainedConfig) -> None:
        """Raise `UnsupportedModel` where the config's frequencies are not the file's."""
        plain = 1 / text.rope_parameters["rope_theta"] ** (torch.arange(0, text.head_dim, 2) / text.head_dim)
        found, _ = ROPE_INIT_FUNCTIONS["llama3"](text, torch.device("cpu"))
        if not torch.allclose(found, plain / self._floats(FREQUENCIES), rtol=1e-3):
            raise UnsupportedModel("model", str(self.path), f"{FREQUENCIES} are not those of Llama 3")

    def _floats(self, name: str) -> torch.Tensor:
        return torch.tensor(self.tensors[name].data.astype("float32"))

    def _require_all_placed(self, model: Any) -> None:
        """Raise `UnsupportedModel` where the file has tensors that the model has not, as biases. Those of experts and
        of predicted tokens are merged or left out.
        """
        names = self.tensors.keys() - {FREQUENCIES, SHORT, LONG}
        held = sum(1 for _ in model.parameters())
        if len(names) > held and not any("_exps" in name or "nextn" in name for name in names):
            why = f"has {len(names)} tensors, and Transformers' {self.architecture} has room for {held}"
            raise UnsupportedModel("model", str(self.path), why)


@contextmanager
def without_bars() -> Iterator[None]:
    """Silence Transformers' progress bars, but the one of dequantizing."""
    if not is_progress_bar_enabled():
        yield
        return
    disable_progress_bar()
    try:
        yield
    finally:
        enable_progress_bar()
