"""Engines without data on fake CUDA tensors: small targets and draft heads with every optional part."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch

from draftgraph.graphs import DecodeState, StateShape, verify_widths
from draftgraph.model_zoo.config import DecoderConfig, HeadsConfig, MlaConfig, MoeConfig, PerLayerInputConfig
from draftgraph.model_zoo.decoder import DecoderModel, KvCache
from draftgraph.model_zoo.dflash.config import DFlashConfig
from draftgraph.model_zoo.dflash.model import ContextWeights, DFlashModel, DFlashWeights
from draftgraph.model_zoo.draft_config import AuxLayers
from draftgraph.model_zoo.draft_files import DraftTensors
from draftgraph.model_zoo.draft_head import DraftHead
from draftgraph.model_zoo.draft_weights import HeadBuilder
from draftgraph.model_zoo.dspark.config import DSparkConfig
from draftgraph.model_zoo.dspark.model import ConfidenceWeights, DSparkModel, MarkovWeights
from draftgraph.model_zoo.eagle.config import EagleConfig
from draftgraph.model_zoo.eagle.model import EagleModel
from draftgraph.model_zoo.eagle3.config import Eagle3Config
from draftgraph.model_zoo.eagle3.model import Eagle3Model, Eagle3Weights
from draftgraph.model_zoo.gemma4_assistant.config import Gemma4AssistantConfig
from draftgraph.model_zoo.gemma4_assistant.model import Gemma4AssistantModel, Gemma4AssistantWeights
from draftgraph.model_zoo.medusa.config import MedusaConfig
from draftgraph.model_zoo.medusa.model import MedusaHead, MedusaModel
from draftgraph.model_zoo.mtp import checkpoint as mtp_checkpoint
from draftgraph.model_zoo.mtp.config import MtpConfig
from draftgraph.model_zoo.mtp.model import MtpModel
from draftgraph.model_zoo.placement import WeightBuilder, decoder_placements
from draftgraph.model_zoo.registry import FAMILIES
from draftgraph.model_zoo.rope import RopeConfig
from draftgraph.runtime.loading import create_budget
from draftgraph.runtime.rounds import RoundBuilder
from draftgraph.runtime.speculative_config import (
    METHODS,
    SpeculativeConfig,
)
from draftgraph.runtime.speculators import BaseSpeculator, SpeculatorParts, create_speculator
from draftgraph.runtime.verification import create_policy
from draftgraph.runtime.vocab_mapping import VocabMapping

CONTEXT = 128


class Regions:
    """What stands in for compiled regions: nothing is compiled, but who looks sees when one runs."""

    def __init__(self) -> None:
        self.running = 0
        """How many are running, one inside the other."""

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The `compile_region` of the models here."""

        @functools.wraps(function)
        def region(*args: Any) -> Any:
            self.running += 1
            try:
                return function(*args)
            finally:
                self.running -= 1

        return region


REGIONS = Regions()


def _target(**choices: Any) -> DecoderConfig:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4}
    layer_types = choices.pop("layer_types", ("full_attention",) * 2)
    rope = RopeConfig(dim=16, theta=10000.0)
    return DecoderConfig(
        **sizes,
        layer_types=layer_types,
        rope=tuple((kind, rope) for kind in sorted(set(layer_types))),
        norm_eps=1e-6,
        max_position_embeddings=CONTEXT,
        attention_scale=0.25,
        **choices,
    )


TARGETS = {
    # Every optional part of a dense model; one of two layers has a sliding window.
    "dense": _target(
        model_type="gemma3_text",
        num_kv_heads=2,
        head_dim=16,
        layer_types=("full_attention", "sliding_attention"),
        sliding_window=32,
        qk_norm=True,
        post_norms=True,
        norm_unit_offset=True,
        final_soft_cap=30.0,
        embedding_scale=5.6,
    ),
    # Heads by kind of layer, a layer that reads another's cache, embeddings for every layer.
    "shared caches": _target(
        model_type="gemma4_text",
        num_kv_heads=2,
        head_dim=16,
        layer_types=("full_attention", "full_attention"),
        full_heads=HeadsConfig(num_kv_heads=1, head_dim=32, keys_are_values=True),
        qk_norm=True,
        post_norms=True,
        value_norm=True,
        num_shared_layers=1,
        shared_mlp_factor=2,
        layer_scale=True,
        per_layer_input=PerLayerInputConfig(vocab_size=50, size=8),
        moe=MoeConfig(layers=(0,), num_experts=4, experts_per_token=2, intermediate_size=24, beside_dense=True),
    ),
    # Gated heads, and a gated shared expert.
    "gated": _target(
        model_type="qwen3_next",
        num_kv_heads=2,
        head_dim=16,
        qk_norm=True,
        norm_unit_offset=True,
        output_gate=True,
        moe=MoeConfig(
            layers=(1,), num_experts=4, experts_per_token=2, intermediate_size=24, shared_size=16, shared_gate=True
        ),
    ),
    # Latent attention; one of two layers has a mixture of experts in groups, and a shared one.
    "latent": _target(
        model_type="deepseek_v3",
        num_kv_heads=1,
        head_dim=40,
        rope_interleaved=True,
        mla=MlaConfig(query_rank=20, kv_rank=24, nope_dim=12, rope_dim=16, value_dim=8),
        moe=MoeConfig(
            layers=(1,),
            num_experts=8,
            experts_per_token=2,
            intermediate_size=24,
            shared_size=16,
            scoring="sigmoid",
            choice_bias=True,
            num_groups=4,
            groups_per_token=2,
            group_members=2,
            normalize=True,
            float32_router=True,
        ),
    ),
}


def fake_target(device: torch.device, name: str) -> DecoderModel:
    """A model with no data."""
    config = TARGETS[name]
    placements = decoder_placements(config, FAMILIES[config.model_type].layer_norms)
    builder = WeightBuilder(config, placements, dtype=torch.bfloat16, device=str(device))
    for tensor, placement in placements.items():
        builder.add(tensor, torch.empty(placement.shape, device=device))
    return DecoderModel(config, builder.build(), compile_region=REGIONS)


def fake_assistant(target: DecoderModel, common: dict[str, Any]) -> Gemma4AssistantModel:
    """A head of queries alone, with a layer for each of the target's types and an ordered vocabulary, with no data."""
    heads = {"num_kv_heads": target.config.num_kv_heads, "head_dim": target.config.head_dim}
    config = _target(
        model_type="gemma4_text",
        **heads,
        full_heads=target.config.full_heads,
        layer_types=target.config.layer_types,
        sliding_window=target.config.sliding_window,
        qk_norm=True,
        post_norms=True,
        num_shared_layers=2,
        layer_scale=True,
    )
    placements = {
        name: placement
        for name, placement in decoder_placements(config, FAMILIES["gemma4_text"].layer_norms).items()
        if name.startswith("model.layers.")
    }
    builder = HeadBuilder(config, placements, dtype=torch.bfloat16, device=str(target.device))
    for name, placement in placements.items():
        builder.add(name, torch.empty(placement.shape, device=target.device))

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=target.device)

    weights = Gemma4AssistantWeights(
        before=empty(32, 64),
        layers=builder.layers(),
        final_norm=empty(32),
        after=empty(32, 32),
        head=empty(50, 32),
        centroids=empty(10, 32),
        ordering=empty(10, 5, dtype=torch.int64),
    )
    assistant = Gemma4AssistantConfig(
        **common, draft_vocab_size=50, layers=config, own_head=False, centroids=10, chosen_centroids=3
    )
    return Gemma4AssistantModel(assistant, target, weights, max_positions=CONTEXT, compile_region=REGIONS)


def fake_modules(target: DecoderModel, count: int, layout: str = "deepseek") -> MtpModel:
    """Prediction modules with no data, with layers like the target's last."""
    config = target.config
    moe = config.moe and dataclasses.replace(config.moe, layers=tuple(range(count)))
    kinds = config.layer_types[-1:]
    modules = MtpConfig(
        format="",
        depth=count,
        vocab_size=config.vocab_size,
        draft_vocab_size=config.vocab_size,
        target_hidden_size=config.hidden_size,
        layers=dataclasses.replace(config, num_layers=count, layer_types=kinds * count, moe=moe),
        layout=layout,
        numbers=tuple(range(count)),
        final_norm=layout != "ernie",
        own_embeddings=(False,) * count,
        own_heads=(False,) * count,
    )
    placements = mtp_checkpoint.placements(modules)
    builder = HeadBuilder(modules.layers, placements, dtype=torch.bfloat16, device=str(target.device))
    for tensor, placement in placements.items():
        builder.add(tensor, torch.empty(placement.shape, device=target.device))
    rest: dict[str, Any] = {"max_positions": CONTEXT, "compile_region": REGIONS}
    return mtp_checkpoint.build(modules, builder, DraftTensors({}), {}, target, **rest)


def fake_block_drafter(spec: SpeculativeConfig, target: DecoderModel) -> DFlashModel:
    """A DFlash or DSpark drafter with every optional part, with no data: of DSpark's heads the recurrent one."""

    def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=target.device)

    layers, head_size = TARGETS["dense"], (2, 1, 16)
    block: dict[str, Any] = {
        "format": "",
        "depth": None,
        "vocab_size": 50,
        "draft_vocab_size": 20,
        "target_hidden_size": 32,
        "layers": layers,
        "aux": AuxLayers(stored=(0, 1), numbering="hidden_states", source="", count=2),
        "block_size": 6,
        "from_anchor": "dspark" in spec.methods,
        "causal": (False, True),
        "mask_token": 3,
        "num_target_layers": 2,
        "fc_bias": True,
        "own_mask": True,
        "own_embedding": True,
        "own_head": True,
    }
    context = ContextWeights(empty(32, 64), empty(32), empty(32), empty(128, 32), empty(128), empty(*head_size))
    of_layers = target.weights.layers
    weights = DFlashWeights(empty(50, 32), of_layers, empty(32), empty(20, 32), context, empty(32))
    more: dict[str, Any] = {
        "target_ids": torch.zeros(20, dtype=torch.int32, device=target.device),
        "max_positions": CONTEXT,
        "compile_region": REGIONS,
        "attention_backend": spec.attention_backend,
    }
    if "dflash" in spec.methods:
        return DFlashModel(DFlashConfig(**block), target, weights, **more)
    heads = {"markov_head": "rnn", "markov_rank": 8, "markov_bias": True, "confidence_bias": True}
    dspark = DSparkConfig(**block, **heads, has_confidence=True, confidence_with_markov=True)
    return DSparkModel(
        dspark,
        target,
        weights,
        markov=MarkovWeights(empty(50, 8), empty(20, 8), empty(24, 48), empty(24)),
        confidence=ConfidenceWeights(empty(40, dtype=torch.float32), empty(1, dtype=torch.float32)),
        **more,
    )


def fake_head(spec: SpeculativeConfig, target: DecoderModel) -> DraftHead | MedusaModel | DFlashModel:
    """A draft head with every optional part, with no data; one that drafts in parallel if that is asked for."""
    if METHODS[spec.methods[-1]].own_attention:
        return fake_block_drafter(spec, target)

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=target.device)

    ids = torch.zeros(20, dtype=torch.int32, device=target.device)
    common: dict[str, Any] = {"format": "", "depth": None, "vocab_size": 50, "target_hidden_size": 32}
    if "mtp" in spec.methods:
        return fake_modules(target, 1) if spec.model is None else fake_assistant(target, common)
    if "medusa" in spec.methods:
        medusa = MedusaConfig(**common, draft_vocab_size=20, num_heads=5, num_layers=1, bias=True, mapped=True)
        heads = MedusaHead((empty(32, 32),), (empty(32),), empty(20, 32))
        return MedusaModel(medusa, (heads,) * 5, target_ids=ids, compile_region=REGIONS)
    # Heads have dense layers, whatever the target has.
    source = target if target.config == TARGETS["dense"] else fake_target(target.device, "dense")
    layers, config = source.weights.layers, source.config
    if "eagle" in spec.methods:
        own = {"fc_bias": True, "own_embedding": False, "own_head": False}
        eagle = EagleConfig(**common, draft_vocab_size=50, layers=config, **own)
        first = layers[0]._replace(attention_norm=None)
        return EagleModel(
            eagle,
            target,
            embedding=target.weights.embedding,
            fc=empty(32, 64),
            fc_bias=empty(32),
            layers=(first, layers[1]),
            max_positions=CONTEXT,
            compile_region=REGIONS,
        )
    eagle3 = Eagle3Config(
        **common,
        draft_vocab_size=20,
        layers=config,
        aux=AuxLayers(stored=(0, 1), numbering="hidden_states", source="", count=2),
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
        pair_norms=empty(2, 32),
        layers=(layers[0]._replace(attention_norm=None, qkv=empty(config.qkv_size, 64)), layers[1]),
        final_norm=empty(32),
        head=empty(20, 32),
        fc=empty(32, 64),
        fc_bias=empty(32),
        input_norm=empty(64),
        fc_norms=empty(2, 32),
    )
    mask = empty(64) if spec.parallel_drafting else None
    more: dict[str, Any] = {"max_positions": CONTEXT, "compile_region": REGIONS}
    return Eagle3Model(eagle3, target, weights, target_ids=ids, mask_state=mask, **more)


class LastToken(BaseSpeculator):
    """Drafts the last token again."""

    def allocate(self, state: DecodeState) -> None:
        """Keeps nothing."""

    def propose(self, state: DecodeState, bucket: int) -> None:
        slots = state.slot_of_row[:bucket].long()
        last = state.tokens[slots, state.length[slots].long() - 1]
        state.draft_tokens[slots] = last[:, None].expand(-1, self.num_speculative_tokens)
        state.draft_count[slots] = self.num_speculative_tokens


def fake_parts(spec: SpeculativeConfig, device: torch.device, target: DecoderModel, cache: KvCache) -> SpeculatorParts:
    """What the method needs to have been loaded."""
    if spec.traits.reads_target:
        head = fake_head(spec, target)
        states = head.config.states_of(target.config)
        return SpeculatorParts(target=target, target_cache=cache, head=head, target_states=states)
    if not spec.traits.language_model:
        return SpeculatorParts(target=target, target_cache=cache)
    ids = torch.zeros(50, dtype=torch.int32, device=device)
    mapping = VocabMapping(ids, ids, ids >= 0) if spec.use_heterogeneous_vocab else None
    return SpeculatorParts(draft=fake_target(device, "dense"), mapping=mapping, target=target, target_cache=cache)


def fake_builder(
    spec: SpeculativeConfig, device: torch.device, target: str = "dense"
) -> tuple[RoundBuilder, DecodeState]:
    depth = spec.num_speculative_tokens or 0
    shape = StateShape(
        slots=4,
        context=CONTEXT,
        num_drafts=depth,
        vocab_size=50,
        max_bucket=4,
        max_width=verify_widths(4, depth)[-1],
        keeps_draft_probs=spec.keeps_draft_probs,
    )
    model = fake_target(device, target)
    state = DecodeState.allocate(shape, dtype=torch.bfloat16, device=device)
    cache = model.allocate_cache(shape.slots + 1, CONTEXT)
    speculator = create_speculator(spec, fake_parts(spec, device, model, cache))
    if speculator is not None:
        speculator.allocate(state)
    policy = create_policy(spec)
    policy.allocate(state)
    return RoundBuilder(model, cache, state, speculator, policy, create_budget(state, spec, speculator, policy)), state
