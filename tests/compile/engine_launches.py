"""What an engine would launch on a GPU: its programs, traced without data at the shapes of well-known checkpoints.

`python tests/compile/engine_launches.py` compiles all of it for every target and prints what spills or uses too much.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path

import torch

from draftgraph.graphs import DecodeState, StateShape, exact_widths, prefill_widths, verify_widths
from draftgraph.graphs.capture_guard import fake_cuda
from draftgraph.kernels.compile_report import SHARED_LIMITS, TARGETS, Usage, compile_specialization, usage_of
from draftgraph.kernels.launch_recorder import Launch, Specialization, record_launches
from draftgraph.model_zoo.config import DecoderConfig
from draftgraph.model_zoo.decoder import DecoderModel
from draftgraph.model_zoo.placement import WeightBuilder, decoder_placements
from draftgraph.model_zoo.registry import family_of
from draftgraph.runtime.loading import DEFAULT_MAX_MODEL_LEN, create_budget
from draftgraph.runtime.rounds import LogprobBuffers, RoundBuilder
from draftgraph.runtime.sampling_params import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from draftgraph.runtime.speculative_config import SpeculativeConfig
from draftgraph.runtime.speculators import SpeculatorParts, create_speculator
from draftgraph.runtime.verification import create_policy
from draftgraph.runtime.vocab_mapping import VocabMapping

SLOTS = 16


def _config(
    family: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    layer_types: tuple[str, ...] = ("",),
    **more: object,
) -> dict[str, object]:
    # Widths and depth of the network do not matter to the kernels.
    hf = {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": heads * head_dim,
        "intermediate_size": 64,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 32768,
        "eos_token_id": 2,
    }
    if len(layer_types) > 1:
        hf["layer_types"] = list(layer_types)
    return hf | more


GEMMA_LAYERS = ("sliding_attention", "full_attention")
CHECKPOINTS: dict[str, dict[str, object]] = {
    "SmolLM2-135M": _config("llama", 9, 3, 64, 49152, max_position_embeddings=8192),
    "SmolLM2-1.7B": _config("llama", 32, 32, 64, 49152, max_position_embeddings=8192),
    "TinyLlama-1.1B": _config("llama", 32, 4, 64, 32000, max_position_embeddings=2048),
    "Llama-3.2-1B": _config("llama", 32, 8, 64, 128256, eos_token_id=[128001, 128008, 128009]),
    "Llama-3.2-3B": _config("llama", 24, 8, 128, 128256, eos_token_id=[128001, 128008, 128009]),
    "Llama-3.1-8B": _config("llama", 32, 8, 128, 128256, eos_token_id=[128001, 128008, 128009]),
    "Llama-2-7B": _config("llama", 32, 32, 128, 32000, max_position_embeddings=4096),
    "Mistral-7B-v0.1": _config("mistral", 32, 8, 128, 32000, sliding_window=4096),
    "Mistral-7B-v0.3": _config("mistral", 32, 8, 128, 32768, sliding_window=None),
    "Qwen2.5-0.5B": _config("qwen2", 14, 2, 64, 151936),
    "Qwen2.5-1.5B": _config("qwen2", 12, 2, 128, 151936),
    "Qwen2.5-7B": _config("qwen2", 28, 4, 128, 152064),
    "Qwen3-0.6B": _config("qwen3", 16, 8, 128, 151936),
    "Qwen3-8B": _config("qwen3", 32, 8, 128, 151936),
    "Gemma-3-270m": _config("gemma3_text", 4, 1, 256, 262144, layer_types=GEMMA_LAYERS, sliding_window=512),
    "Gemma-3-1B": _config("gemma3_text", 4, 1, 256, 262144, layer_types=GEMMA_LAYERS, sliding_window=512),
    "Gemma-3-4B": _config("gemma3_text", 8, 4, 256, 262208, layer_types=GEMMA_LAYERS, sliding_window=1024),
    "Gemma-3-27B": _config("gemma3_text", 32, 16, 128, 262208, layer_types=GEMMA_LAYERS, sliding_window=1024),
    "MiMo-7B": _config("mimo", 32, 8, 128, 151680),
    "ERNIE-4.5-0.3B": _config("ernie4_5", 16, 2, 128, 103424),
}
"""What their config.json says, as far as kernels depend on it."""

_EXPERTS = {"num_experts_per_tok": 8, "first_k_dense_replace": 0, "num_hidden_layers": 1}
MIXTURES: dict[str, dict[str, object]] = {
    "Qwen3-30B-A3B": _config(
        "qwen3_moe", 32, 4, 128, 151936, hidden_size=2048, num_experts=128, moe_intermediate_size=768, **_EXPERTS
    ),
    "GLM-4.5-Air": _config("glm4_moe", 96, 8, 128, 151552, hidden_size=4096, **_EXPERTS),
    "ERNIE-4.5-21B-A3B": _config("ernie4_5_moe", 20, 4, 128, 103424, hidden_size=2560, moe_layer_start_index=0),
    "DeepSeek-V2-Lite": _config(
        "deepseek_v2",
        16,
        16,
        128,
        102400,
        **_EXPERTS
        | {"hidden_size": 2048, "q_lora_rank": None, "num_experts_per_tok": 6, "moe_intermediate_size": 1408},
    ),
    "DeepSeek-V3": _config("deepseek_v3", 128, 128, 128, 129280, hidden_size=7168, **_EXPERTS),
    "Gemma-4-26B-A4B": _config(
        "gemma4_text",
        16,
        8,
        256,
        262144,
        layer_types=GEMMA_LAYERS,
        hidden_size=2816,
        hidden_size_per_layer_input=0,
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
}
"""Those with mixtures of experts, of whose kernels the widths do matter: in bfloat16 alone, to keep the time short."""
CHECKPOINTS |= MIXTURES

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True)
class Setting:
    """One engine."""

    checkpoint: str
    dtype: torch.dtype
    drafts: int
    """0 for plain decoding, else prompt lookup of that many tokens."""
    rule: str
    buckets: tuple[int, ...] = (1, 2, 4, 8, 16)
    exact: bool = False
    max_model_len: int = DEFAULT_MAX_MODEL_LEN
    shortest: int = 2
    longest: int = 4
    drafter: str = ""
    """A checkpoint that drafts, in place of prompt lookup; through a mapping if its vocabulary is another."""
    samples_drafts: bool = False
    suffix: bool = False
    """Suffix decoding in place of prompt lookup."""
    adaptive: bool = False


def settings() -> Iterator[Setting]:
    """Every checkpoint in every type, and beside the defaults what a user may choose."""
    for name, dtype in itertools.product(CHECKPOINTS, DTYPES):
        # Kernels tell one row from several, and windows of few queries from those of many.
        if name not in MIXTURES or dtype == torch.bfloat16:
            yield Setting(name, dtype, 5, "standard", buckets=(1, 16))
    for name in ("SmolLM2-135M", "Llama-3.1-8B", "Gemma-3-4B"):
        yield Setting(name, torch.bfloat16, 5, "standard")
    for dtype, rule in itertools.product(DTYPES, ("standard", "coupled")):
        yield Setting("SmolLM2-135M", dtype, 0, rule)
    small, bf16 = "SmolLM2-135M", torch.bfloat16
    for drafts, rule in itertools.product((1, 3, 7, 8, 15), ("coupled", "block", "synthetic")):
        yield Setting(small, bf16, drafts, rule, buckets=(1, 2, 16) if rule == "coupled" else (1, 2))
    for name, dtype in itertools.product(("Llama-2-7B", "SmolLM2-135M", "Llama-3.1-8B", "Gemma-3-4B"), DTYPES):
        yield Setting(name, dtype, 5, "block", buckets=(1,))
    for dtype in DTYPES:
        yield Setting("Llama-3.1-8B", dtype, 15, "standard", exact=True, buckets=(16,))
        yield Setting("Llama-3.1-8B", dtype, 0, "coupled", exact=True, buckets=(1,))
    for drafts in (31, 63, 128):
        yield Setting(small, bf16, drafts, "standard", buckets=(1, 2))
    for length in (100, 1000, 2048):
        yield Setting(small, bf16, 5, "standard", max_model_len=length, buckets=(1, 4))
    yield Setting("Llama-3.1-8B", bf16, 5, "standard", max_model_len=32768)
    for shortest, longest in ((1, 1), (1, 3), (3, 3), (2, 5), (1, 8), (1, 16)):
        yield Setting(small, bf16, 5, "coupled", shortest=shortest, longest=longest, buckets=(1,))
    yield Setting(small, bf16, 5, "coupled", buckets=(3, 5, 12))
    for drafts in (5, 24):
        yield Setting(small, bf16, drafts, "coupled", buckets=(1, 4), suffix=True)
    pairs = [(small, small), ("Llama-3.1-8B", "Llama-3.2-1B"), ("Gemma-3-4B", small)]
    for (target, drafter), dtype in itertools.product(pairs, DTYPES):
        yield Setting(target, dtype, 4, "coupled", drafter=drafter, buckets=(1, 16))
    for (target, drafter), rule in itertools.product(pairs[:2], ("standard", "block", "coupled")):
        yield Setting(target, bf16, 4, rule, drafter=drafter, samples_drafts=True, buckets=(1, 4))
    for dtype in DTYPES:
        yield Setting(small, dtype, 1, "standard", drafter=small, samples_drafts=True, buckets=(1,))
    for drafts in (1, 3, 7, 15):
        yield Setting(small, bf16, drafts, "standard", adaptive=True, buckets=(1, 4, 16) if drafts == 7 else (1, 16))
    yield Setting(small, bf16, 5, "standard", drafter=small, samples_drafts=True, adaptive=True, buckets=(1, 4, 16))
    yield Setting(small, bf16, 63, "coupled", adaptive=True, buckets=(1, 16))


def launches_of(setting: Setting, *, amd: bool = False) -> list[Launch]:
    """Every launch of every program of an engine, with log-probabilities, each layer kind once."""
    config = read_config(setting.checkpoint)
    drafter = read_config(setting.drafter) if setting.drafter else None
    foreign = drafter is not None and drafter.vocab_size != config.vocab_size
    depth = setting.drafts
    looks_up = bool(depth) and drafter is None and not setting.suffix
    speculative = SpeculativeConfig(
        method="suffix" if setting.suffix else "ngram" if looks_up else "draft_model" if depth else "none",
        model=setting.drafter or None,
        draft_sample_method="probabilistic" if setting.samples_drafts else "greedy",
        use_heterogeneous_vocab=foreign,
        num_speculative_tokens=depth or None,
        enable_adaptive_verification=setting.adaptive,
        rejection_sample_method=setting.rule,
        synthetic_acceptance_length=1.5 if setting.rule == "synthetic" else None,
        **({"prompt_lookup_min": setting.shortest, "prompt_lookup_max": setting.longest} if looks_up else {}),
    )
    widths_of = exact_widths if setting.exact else verify_widths
    widths = {bucket: widths_of(bucket, depth) for bucket in setting.buckets}
    context = min(setting.max_model_len, config.max_position_embeddings)
    with fake_cuda() as device, record_launches(amd=amd) as launches:
        model = fake_model(config, setting.dtype, device)
        shape = StateShape(
            slots=setting.buckets[-1],
            context=context,
            num_drafts=depth,
            vocab_size=config.vocab_size,
            max_bucket=setting.buckets[-1],
            max_width=max(w[-1] for w in widths.values()),
            max_stop_tokens=MAX_STOP_TOKEN_IDS + len(config.eos_token_ids),
            keeps_draft_probs=speculative.keeps_draft_probs,
        )
        state = DecodeState.allocate(shape, dtype=setting.dtype, device=device)
        parts = SpeculatorParts()
        if drafter is not None:
            mapping = fake_mapping(config.vocab_size, drafter.vocab_size, device) if foreign else None
            parts = SpeculatorParts(draft=fake_model(drafter, setting.dtype, device), mapping=mapping)
        speculator = create_speculator(speculative, parts)
        if speculator is not None:
            speculator.allocate(state)
        policy = create_policy(speculative)
        policy.allocate(state)
        cache = model.allocate_cache(shape.slots + 1, context)
        budget = create_budget(state, speculative, speculator, policy)
        builder = RoundBuilder(model, cache, state, speculator, policy, budget)
        entries = (*state.tokens.shape, MAX_LOGPROBS + 1)
        buffers = LogprobBuffers(
            torch.zeros(entries, device=device), torch.zeros(entries, dtype=torch.int32, device=device)
        )
        programs = [builder.prefill(width) for width in prefill_widths(setting.exact)]
        programs += [builder.round(bucket, widths[bucket], buffers, detailed=True) for bucket in setting.buckets]
        with torch.inference_mode():
            for step in (step for program in programs for step in program.steps()):
                step.fn(state)
    return launches


def read_config(checkpoint: str) -> DecoderConfig:
    """The sizes of a checkpoint."""
    hf = dict(CHECKPOINTS[checkpoint])
    return family_of(hf).read_config(hf)


def fake_mapping(target: int, draft: int, device: torch.device) -> VocabMapping:
    """Between two vocabularies of these sizes, without data."""
    draft_ids = torch.empty(target, dtype=torch.int32, device=device)
    target_ids = torch.empty(draft, dtype=torch.int32, device=device)
    return VocabMapping(draft_ids, target_ids, torch.empty(draft, dtype=torch.bool, device=device))


def fake_model(config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> DecoderModel:
    """A decoder without data that has every tensor that the config asks for."""
    placements = decoder_placements(config, family_of({"model_type": config.model_type}).layer_norms)
    builder = WeightBuilder(config, placements, dtype=dtype, device=str(device))
    for name, placement in placements.items():
        builder.add(name, torch.empty(placement.shape, dtype=dtype, device=device))
    return DecoderModel(config, builder.build())


def engine_specializations(*, amd: bool = False) -> dict[Specialization, tuple[Launch, Setting]]:
    """Every specialisation that any of the `settings` asks for, with the first launch and setting that does."""
    found: dict[Specialization, tuple[Launch, Setting]] = {}
    for setting in settings():
        for launch in launches_of(setting, amd=amd):
            found.setdefault(launch.specialization, (launch, setting))
    return found


def compile_for(target: str) -> list[Usage]:
    """Compiles every specialisation for one target; a usage's variant says what the kernel is and who asks for it."""
    usages = []
    for specialization, (launch, setting) in engine_specializations(amd=target.startswith("gfx")).items():
        dtype = str(setting.dtype).removeprefix("torch.")
        variant = f"{launch.name} of {setting.checkpoint} in {dtype}, {launch.constants}"
        usages.append(usage_of(compile_specialization(specialization, target), launch.op, variant, target))
    return usages


def is_over_budget(usage: Usage) -> bool:
    """Whether a kernel spills, or uses more than every target has."""
    return usage.spills > 0 or usage.registers > 256 or usage.shared > min(SHARED_LIMITS.values())


def main() -> int:
    """The command; its result is the process's exit status."""
    parser = argparse.ArgumentParser(description="Compiles all that an engine asks for.")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")
    options = parser.parse_args()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        usages = [usage for part in pool.map(compile_for, options.targets) for usage in part]
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(usage) for usage in usages]), encoding="utf-8")
    over = [usage for usage in usages if is_over_budget(usage)]
    for usage in over:
        print(usage)
    print(f"{len(usages)} kernels for {', '.join(options.targets)}; {len(over)} spill or use too much")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
