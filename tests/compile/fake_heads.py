"""Draft heads without data, to be traced."""

from __future__ import annotations

from typing import Any

import torch

from draftgraph.model_zoo.decoder import DecoderModel
from draftgraph.model_zoo.draft_config import AuxLayers
from draftgraph.model_zoo.draft_head import DraftHead
from draftgraph.model_zoo.eagle.config import EagleConfig
from draftgraph.model_zoo.eagle.model import EagleModel
from draftgraph.model_zoo.eagle3.config import Eagle3Config
from draftgraph.model_zoo.eagle3.model import Eagle3Model, Eagle3Weights
from draftgraph.model_zoo.medusa.config import MedusaConfig
from draftgraph.model_zoo.medusa.model import MedusaHead, MedusaModel
from draftgraph.runtime.speculative_config import SpeculativeConfig


def fake_head(
    spec: SpeculativeConfig, target: DecoderModel, *, draft_vocab: int, max_positions: int
) -> DraftHead | MedusaModel:
    """A draft head with every optional part and the target's layers; one that drafts in parallel if that is asked for.

    Args:
        spec: whose method it is for.
        target: gives its sizes, type and device.
        draft_vocab: how many tokens EAGLE-3 and Medusa draft.
        max_positions: the longest context.
    """
    config, hidden = target.config, target.config.hidden_size

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=target.dtype, device=target.device)

    ids = torch.zeros(draft_vocab, dtype=torch.int32, device=target.device)
    common: dict[str, Any] = {"format": "", "depth": None, "vocab_size": config.vocab_size}
    common["target_hidden_size"] = hidden
    if "medusa" in spec.methods:
        medusa = MedusaConfig(**common, draft_vocab_size=draft_vocab, num_heads=5, num_layers=1, bias=True, mapped=True)
        heads = MedusaHead((empty(hidden, hidden),), (empty(hidden),), empty(draft_vocab, hidden))
        return MedusaModel(medusa, (heads,) * 5, target_ids=ids)
    first, *others = target.weights.layers
    if "eagle" in spec.methods:
        own = {"fc_bias": True, "own_embedding": False, "own_head": False}
        eagle = EagleConfig(**common, draft_vocab_size=config.vocab_size, layers=config, **own)
        return EagleModel(
            eagle,
            target,
            embedding=target.weights.embedding,
            fc=empty(hidden, 2 * hidden),
            fc_bias=empty(hidden),
            layers=(first._replace(attention_norm=None), *others),
            max_positions=max_positions,
        )
    count = min(2, config.num_layers)
    eagle3 = Eagle3Config(
        **common,
        draft_vocab_size=draft_vocab,
        layers=config,
        aux=AuxLayers(stored=tuple(range(count)), numbering="hidden_states", source="", count=count),
        has_fc=True,
        fc_bias=True,
        input_norm=True,
        fc_norm=True,
        norm_before_residual=True,
        norm_output=True,
        own_embedding=False,
        own_head=True,
        mask_token=3 if spec.parallel_drafting else None,
    )
    weights = Eagle3Weights(
        embedding=target.weights.embedding,
        pair_norms=empty(2, hidden),
        layers=(first._replace(attention_norm=None, qkv=empty(config.qkv_size, 2 * hidden)), *others),
        final_norm=empty(hidden),
        head=empty(draft_vocab, hidden),
        fc=empty(hidden, count * hidden),
        fc_bias=empty(hidden),
        input_norm=empty(count * hidden),
        fc_norms=empty(count, hidden),
    )
    mask = empty(count * hidden) if spec.parallel_drafting else None
    return Eagle3Model(eagle3, target, weights, target_ids=ids, mask_state=mask, max_positions=max_positions)
