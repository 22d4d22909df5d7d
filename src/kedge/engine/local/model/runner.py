"""Running one flattened batch through a Transformers model."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.engine.local.attention import paged as attention
from kedge.engine.local.attention.paged import Batch, ForwardBatch
from kedge.engine.local.model import layout
from kedge.engine.local.model.graphs import StepGraphs
from kedge.kv.spec import KVSpec, longest, translation_refusal
from kedge.types import SamplingParams


class ModelRunner:
    """A loaded model with what Kedge derives from it. `forward` is the only place where it runs.

    `kedge.engine.local.model.loading.checked_runner` makes a runner with checked results.
    """

    def __init__(self, model: PreTrainedModel, *, latent: bool = True) -> None:
        """Find out what its KV looks like, and give the model Kedge's attention. Unless `latent`, keys and values of
        all heads are kept even where a latent would do. Raises `UnsupportedModel`.
        """
        self.model = model
        self.graphs: StepGraphs | None = None
        """CUDA graphs over the engine's storage, if it has any."""
        config = model.config.get_text_config()
        self.device = model.device
        self.vocab_size: int = config.vocab_size
        self.max_positions = longest(config)
        spec = KVSpec.from_config(model.config, dtype=model.dtype)
        found = layout.find(model, spec, self.max_positions, latent=latent)
        self.spec, self.rotary = found.spec, found.rotary
        self.refusal = translation_refusal(model.config) or found.refusal
        """Why the model's KV cannot be translated; None if it can."""
        self.sampling = SamplingParams.of_model(
            model.generation_config.to_diff_dict() if model.generation_config else {}
        )
        """How the model is sampled by its own config, where a request says nothing"""
        eos = model.generation_config.eos_token_id if model.generation_config else config.eos_token_id
        self.eos_token_ids = frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])
        model.set_attn_implementation(attention.NAME)

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Tensor:
        """Write the KV of all tokens of the batch. Returns logits [rows, vocab] as float32, of the rows that
        need them.
        """
        replayed = self.graphs.replay(batch) if self.graphs else None
        return self.run(batch) if replayed is None else replayed

    def run(self, batch: ForwardBatch) -> Tensor:
        """Run a pass of any kind as `forward` does, launching kernel by kernel."""
        with attention.kernels_of(self.device):
            out = self.model(
                input_ids=batch.tokens[None],
                position_ids=batch.positions[None],
                use_cache=False,
                logits_to_keep=batch.logits_rows,
                kedge=batch,
            )
        return out.logits[0].float()
