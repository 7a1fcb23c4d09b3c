"""Every step of every program of an engine is traced on fake CUDA tensors: no sync, no host copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftgraph.graphs import DecodeState, StateShape, prefill_widths, verify_widths
from draftgraph.graphs.capture_guard import CaptureError, check_program, fake_cuda
from draftgraph.model_zoo.config import DecoderConfig
from draftgraph.model_zoo.decoder import DecoderModel, DecoderWeights, LayerWeights
from draftgraph.model_zoo.draft_config import AuxLayers
from draftgraph.model_zoo.draft_head import DraftHead
from draftgraph.model_zoo.eagle.config import EagleConfig
from draftgraph.model_zoo.eagle.model import EagleModel
from draftgraph.model_zoo.eagle3.config import Eagle3Config
from draftgraph.model_zoo.eagle3.model import Eagle3Model, Eagle3Weights
from draftgraph.model_zoo.medusa.config import MedusaConfig
from draftgraph.model_zoo.medusa.model import MedusaHead, MedusaModel
from draftgraph.model_zoo.rope import RopeConfig
from draftgraph.runtime.rounds import LogprobBuffers, RoundBuilder
from draftgraph.runtime.speculative_config import METHODS, REJECTION_SAMPLE_METHODS, SpeculativeConfig
from draftgraph.runtime.speculators import SpeculatorParts, create_speculator
from draftgraph.runtime.verification import create_policy
from draftgraph.runtime.vocab_mapping import VocabMapping

pytestmark = pytest.mark.null

BUCKETS = (1, 4)
CONTEXT = 128


def fake_target(device: torch.device) -> DecoderModel:
    """A model with every optional part, with no data: two layers, one of them with a sliding window."""
    layer_types = ("full_attention", "sliding_attention")
    config = DecoderConfig(
        model_type="gemma3_text",
        vocab_size=50,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        norm_eps=1e-6,
        max_position_embeddings=CONTEXT,
        rope=tuple((kind, RopeConfig(dim=16, theta=10000.0)) for kind in layer_types),
        layer_types=layer_types,
        sliding_window=32,
        qk_norm=True,
        post_norms=True,
        norm_unit_offset=True,
        attention_scale=0.25,
        final_soft_cap=30.0,
        embedding_scale=5.6,
    )

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=device)

    layer = LayerWeights(
        attention_norm=empty(32),
        qkv=empty(config.qkv_size, 32),
        output=empty(32, 64),
        mlp_norm=empty(32),
        gate_up=empty(96, 32),
        down=empty(32, 48),
        query_norm=empty(16),
        key_norm=empty(16),
        attention_post_norm=empty(32),
        mlp_post_norm=empty(32),
    )
    embedding = empty(50, 32)
    return DecoderModel(config, DecoderWeights(embedding, (layer, layer), empty(32), embedding))


def fake_head(spec: SpeculativeConfig, target: DecoderModel) -> DraftHead | MedusaModel:
    """A draft head with every optional part, with no data; one that drafts in parallel if that is asked for."""

    def empty(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=target.device)

    ids = torch.zeros(20, dtype=torch.int32, device=target.device)
    common: dict[str, Any] = {"format": "", "depth": None, "vocab_size": 50, "target_hidden_size": 32}
    if spec.method == "medusa":
        medusa = MedusaConfig(**common, draft_vocab_size=20, num_heads=5, num_layers=1, bias=True, mapped=True)
        heads = MedusaHead((empty(32, 32),), (empty(32),), empty(20, 32))
        return MedusaModel(medusa, (heads,) * 5, target_ids=ids)
    layers = target.weights.layers
    config = target.config
    if spec.method == "eagle":
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
    return Eagle3Model(eagle3, target, weights, target_ids=ids, mask_state=mask, max_positions=CONTEXT)


def fake_parts(spec: SpeculativeConfig, target: DecoderModel) -> SpeculatorParts:
    """What the method needs to have been loaded."""
    device = target.device
    if METHODS[spec.method].reads_target:
        head = fake_head(spec, target)
        return SpeculatorParts(head=head, target_states=head.config.states_of(target.config))
    if not METHODS[spec.method].language_model:
        return SpeculatorParts()
    ids = torch.zeros(50, dtype=torch.int32, device=device)
    mapping = VocabMapping(ids, ids, ids >= 0) if spec.use_heterogeneous_vocab else None
    return SpeculatorParts(draft=fake_target(device), mapping=mapping)


def fake_builder(spec: SpeculativeConfig, device: torch.device) -> tuple[RoundBuilder, DecodeState]:
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
    model = fake_target(device)
    state = DecodeState.allocate(shape, dtype=torch.bfloat16, device=device)
    speculator = create_speculator(spec, fake_parts(spec, model))
    if speculator is not None:
        speculator.allocate(state)
    cache = model.allocate_cache(shape.slots + 1, CONTEXT)
    policy = create_policy(spec)
    policy.allocate(state)
    return RoundBuilder(model, cache, state, speculator, policy), state


def available_methods() -> list[str]:
    return [name for name, method in METHODS.items() if method.available]


def variants() -> list[tuple[str, dict[str, object]]]:
    """Every available method, with the options that change its steps."""
    found: list[tuple[str, dict[str, object]]] = []
    for name in available_methods():
        method = METHODS[name]
        options: dict[str, object] = {"model": "some/draft"} if method.needs_model else {}
        found.append((name, options))
        if method.samples_drafts:
            found.append((name, {**options, "draft_sample_method": "probabilistic"}))
        if method.parallel:
            found.append((name, {**options, "parallel_drafting": True}))
        if method.own_vocabulary:
            found.append((name, {**options, "use_heterogeneous_vocab": True}))
    return found


def cases() -> list[tuple[str, dict[str, object], str]]:
    """Every variant with every rule; those that read the target with the rules that change what they draft."""
    return [
        (method, options, rule)
        for method, options in variants()
        for rule in REJECTION_SAMPLE_METHODS
        if not METHODS[method].reads_target or rule in ("standard", "coupled")
    ]


@pytest.mark.parametrize(("method", "options", "rule"), cases(), ids=str)
def test_every_step_of_every_program_is_capture_safe(method, options, rule):
    depth = None if method == "none" else 5
    spec = SpeculativeConfig(
        method=method,
        num_speculative_tokens=depth,
        rejection_sample_method=rule,
        synthetic_acceptance_length=1.0 if rule == "synthetic" else None,
        **options,
    )
    with fake_cuda() as device:
        builder, state = fake_builder(spec, device)
        buffers = LogprobBuffers(
            torch.zeros((5, CONTEXT, 4), device=device), torch.zeros((5, CONTEXT, 4), dtype=torch.int32, device=device)
        )
        for bucket in BUCKETS:
            widths = verify_widths(bucket, depth or 0)
            program = builder.round(bucket, widths, buffers, detailed=True)
            names = [step.name for step in program.steps()]
            expected = ["budget", *(f"verify[{w}]" for w in widths), "accept", "logprobs", "commit"]
            assert names == (expected if method == "none" else ["propose", *expected])
            assert check_program(program) == len(names)
        for width in prefill_widths(exact=False):
            assert check_program(builder.prefill(width)) == 1
        assert state.tokens.device.type == "cuda"


@pytest.mark.parametrize(
    "plant",
    [
        lambda t: t.sum().item(),
        lambda t: t.cpu(),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
    ],
    ids=["item", "cpu", "nonzero", "boolean index"],
)
def test_a_fault_planted_in_a_step_is_caught(plant, monkeypatch):
    with fake_cuda() as device:
        builder, _ = fake_builder(SpeculativeConfig(), device)
        program = builder.round(1, verify_widths(1, 0))
        check_program(program)
        original = DecoderModel.logits

        def logits(self: DecoderModel, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            plant(hidden)
            return original(self, hidden, out)

        monkeypatch.setattr(DecoderModel, "logits", logits)
        with pytest.raises(CaptureError, match=r"step 'verify\[4\]' cannot be captured"):
            check_program(program)
