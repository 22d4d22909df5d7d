"""Small configs: layers of every type, whether a config lists the types or computes them."""

from __future__ import annotations

import pytest
from transformers import JambaConfig, PretrainedConfig, Qwen3NextConfig, StableLmConfig

from kedge.engine.local.model.replica import MOST_LAYERS, small_config, trial
from kedge.errors import UnsupportedModel

BOTH = {"linear_attention", "full_attention"}


@pytest.mark.parametrize(
    ("config", "layers"),
    [(Qwen3NextConfig(), 2), (JambaConfig(), 5), (JambaConfig(attn_layer_period=3, attn_layer_offset=1), 2)],
)
def test_a_small_copy_has_layers_of_every_type(config: PretrainedConfig, layers: int) -> None:
    small = small_config(config)
    assert set(small.layer_types) == set(config.layer_types) == BOTH
    assert small.num_hidden_layers == layers


def test_a_type_that_comes_late_is_not_left_out() -> None:
    late = JambaConfig(attn_layer_period=16, attn_layer_offset=MOST_LAYERS)
    with pytest.raises(ValueError, match="only from layer 9 on"):
        small_config(late)
    assert not trial(late).ran


def test_what_is_not_translated_is_run_all_the_same() -> None:
    for kind in (JambaConfig, Qwen3NextConfig):
        tried = trial(kind())
        assert tried.ran
        assert "keep one state of all tokens before" in str(tried.translation_refusal)


def test_what_is_refused_is_not_run() -> None:
    with pytest.raises(UnsupportedModel, match="attention of its own only"):
        trial(StableLmConfig())
