"""Every step of every program of an engine is traced on fake CUDA tensors: no sync, no host copy."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch

from draftgraph.graphs import DecodeState, StateShape, prefill_widths, verify_widths
from draftgraph.graphs.capture_guard import CaptureError, check_program, fake_cuda
from draftgraph.model_zoo.config import DecoderConfig, HeadsConfig, MlaConfig, MoeConfig, PerLayerInputConfig
from draftgraph.model_zoo.decoder import DecoderModel, KvCache, identity
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
from draftgraph.runtime.rounds import LogprobBuffers, RoundBuilder
from draftgraph.runtime.speculative_config import (
    DRAFT_SAMPLE_METHODS,
    METHODS,
    REJECTION_SAMPLE_METHODS,
    SpeculativeConfig,
)
from draftgraph.runtime.speculators import BaseSpeculator, SpeculatorParts, create_speculator
from draftgraph.runtime.verification import create_policy
from draftgraph.runtime.vocab_mapping import VocabMapping

pytestmark = pytest.mark.null

BUCKETS = (1, 4)
CONTEXT = 128


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
    return DecoderModel(config, builder.build())


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
    return Gemma4AssistantModel(assistant, target, weights, max_positions=CONTEXT)


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
    rest: dict[str, Any] = {"max_positions": CONTEXT, "compile_region": identity}
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
        return MedusaModel(medusa, (heads,) * 5, target_ids=ids)
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


def available_methods() -> list[str]:
    return [name for name, method in METHODS.items() if method.available]


def variants() -> list[tuple[str | tuple[str, ...], dict[str, object]]]:
    """Every available method, with the options that change its steps."""
    found: list[tuple[str | tuple[str, ...], dict[str, object]]] = []
    for name in available_methods():
        method = METHODS[name]
        options: dict[str, object] = {"model": "some/draft"} if method.needs_model else {}
        if method.exits_early:
            options["exit_layer"] = 1
        if method.user_class:
            options["speculator"] = f"{__name__}:LastToken"
        found.append((name, options))
        if method.samples_drafts:
            found.append((name, {**options, "draft_sample_method": "probabilistic"}))
        if method.parallel:
            found.append((name, {**options, "parallel_drafting": True}))
        if method.own_attention:
            found.append((name, {**options, "attention_backend": "reference"}))
        if method.markov:
            found.append((name, {**options, "dspark_draft_topk": 4, "draft_sample_method": "probabilistic"}))
        if method.own_vocabulary:
            found.append((name, {**options, "use_heterogeneous_vocab": True}))
    everything: dict[str, object] = {"model": "some/draft", "exit_layer": 2, "speculator": f"{__name__}:LastToken"}
    found.append((("ngram", "custom", "layerskip", "draft_model"), everything))
    found.append((("ngram", "eagle3"), {"model": "some/draft"}))
    found.append((("ngram", "mtp"), {}))
    found += [("mtp", {"model": "some/draft", "draft_sample_method": s}) for s in DRAFT_SAMPLE_METHODS]
    return found


def reads_target(method: str | tuple[str, ...]) -> bool:
    return any(METHODS[name].reads_target for name in ((method,) if isinstance(method, str) else method))


def cases() -> list[tuple[str | tuple[str, ...], dict[str, object], str]]:
    """Every variant with every rule; those that read the target with the rules that change what they draft."""
    return [
        (method, options, rule)
        for method, options in variants()
        for rule in REJECTION_SAMPLE_METHODS
        if not reads_target(method) or rule in ("standard", "coupled")
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


VARYING = [
    {"method": "ngram", "enable_adaptive_verification": True},
    {"method": "medusa", "model": "some/draft", "enable_adaptive_verification": True},
    {"method": "dspark", "model": "some/draft", "enable_adaptive_verification": True},
    *(
        {**method, **budget}
        for method in (
            {"method": "draft_model", "model": "some/draft", "draft_sample_method": "probabilistic"},
            {"method": "layerskip", "exit_layer": 1},
            {"method": "eagle3", "model": "some/draft"},
        )
        for budget in (
            {"enable_adaptive_verification": True},
            {"num_speculative_tokens_per_batch_size": [[1, 2, 5], [3, 4, 0]]},
        )
    ),
]


@pytest.mark.parametrize("options", VARYING, ids=str)
def test_the_steps_of_rounds_of_varying_depth_are_capture_safe(options):
    spec = SpeculativeConfig(**options, num_speculative_tokens=5)
    stepwise = spec.method in ("draft_model", "layerskip", "eagle3")
    with fake_cuda() as device:
        builder, _ = fake_builder(spec, device)
        for bucket in BUCKETS:
            program = builder.round(bucket, verify_widths(bucket, 5))
            names = [step.name for step in program.steps()]
            drafts = [f"draft[{step}]" for step in range(5)] if stepwise else []
            assert names[: names.index("budget")] == ["propose", *drafts]
            assert check_program(program) == len(names)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        *itertools.product(
            ({"method": "ngram"}, {"method": "layerskip", "exit_layer": 1}, {"method": "eagle", "model": "some/draft"}),
            ("shared caches", "latent"),
        ),
        ({"method": "mtp", "model": "some/draft"}, "shared caches"),
    ],
    ids=str,
)
def test_the_steps_of_other_targets_are_capture_safe(name, options):
    spec = SpeculativeConfig(**options, num_speculative_tokens=5)
    with fake_cuda() as device:
        builder, _ = fake_builder(spec, device, name)
        for bucket in BUCKETS:
            program = builder.round(bucket, verify_widths(bucket, 5))
            assert check_program(program) == len(list(program.steps()))
        assert check_program(builder.prefill(prefill_widths(exact=False)[0])) == 1


@pytest.mark.parametrize("layout", ["deepseek", "qwen", "mimo", "ernie"])
@pytest.mark.parametrize(("count", "target"), [(2, "dense"), (4, "latent"), (1, "gated")])
def test_the_steps_of_prediction_modules_are_capture_safe(monkeypatch, count, target, layout):
    """All in one turn, and in two; with latent attention and mixtures of experts too."""
    spec = SpeculativeConfig(method="mtp", num_speculative_tokens=4, draft_sample_method="probabilistic")
    monkeypatch.setattr(f"{__name__}.fake_head", lambda spec, model: fake_modules(model, count, layout))
    with fake_cuda() as device:
        builder, _ = fake_builder(spec, device, target)
        for bucket in BUCKETS:
            program = builder.round(bucket, verify_widths(bucket, 4))
            assert check_program(program) == len(list(program.steps()))
        assert check_program(builder.prefill(prefill_widths(exact=False)[0])) == 1


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
