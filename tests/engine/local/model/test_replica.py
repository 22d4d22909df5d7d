"""Small configs: layers of every type that a config lists, and what is refused."""

from __future__ import annotations

import pytest
from transformers import Gemma3TextConfig, StableLmConfig

from kedge.engine.local.model.replica import small_config, trial
from kedge.errors import UnsupportedModel


def test_a_small_copy_has_layers_of_every_type() -> None:
    config = Gemma3TextConfig()
    small = small_config(config)
    assert (len(config.layer_types), small.num_hidden_layers) == (26, 2)
    assert set(small.layer_types) == set(config.layer_types) == {"sliding_attention", "full_attention"}


def test_what_is_refused_is_not_run() -> None:
    with pytest.raises(UnsupportedModel, match="attention of its own only"):
        trial(StableLmConfig())
