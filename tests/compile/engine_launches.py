"""What an engine would launch on a GPU: its programs, traced without data at the shapes of well-known checkpoints.

`python tests/compile/engine_launches.py` compiles all of it for every target and prints what spills or uses too much.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path

import torch
from engine_heads import fake_head, fake_modules
from engine_settings import CHECKPOINTS, DRAFTER, Setting, sampled_settings, settings

from draftgraph.graphs import DecodeState, StateShape, exact_widths, prefill_widths, verify_widths
from draftgraph.graphs.capture_guard import fake_cuda
from draftgraph.kernels.compile_report import SHARED_LIMITS, TARGETS, Usage, compile_jobs
from draftgraph.kernels.launch_recorder import Launch, Specialization, record_launches
from draftgraph.model_zoo.config import DecoderConfig
from draftgraph.model_zoo.decoder import DecoderModel
from draftgraph.model_zoo.placement import WeightBuilder, decoder_placements
from draftgraph.model_zoo.registry import family_of
from draftgraph.runtime.loading import create_budget
from draftgraph.runtime.rounds import LogprobBuffers, RoundBuilder
from draftgraph.runtime.sampling_params import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from draftgraph.runtime.speculative_config import METHODS, SpeculativeConfig
from draftgraph.runtime.speculators import SpeculatorParts, create_speculator
from draftgraph.runtime.verification import create_policy
from draftgraph.runtime.vocab_mapping import VocabMapping


def launches_of(setting: Setting, *, amd: bool = False) -> list[Launch]:
    """Every launch of every program of an engine, with log-probabilities, each layer kind once."""
    config = read_config(setting.checkpoint)
    depth = setting.drafts
    drafter = read_config(setting.drafter) if "draft_model" in setting.method else None
    foreign = drafter is not None and drafter.vocab_size != config.vocab_size
    method = setting.method if depth else "none"
    names = (method,) if isinstance(method, str) else method
    needs_model = any(METHODS[name].needs_model for name in names)
    speculative = SpeculativeConfig(
        method=method,
        model=DRAFTER if needs_model else None,
        use_heterogeneous_vocab=foreign,
        num_speculative_tokens=depth or None,
        rejection_sample_method=setting.rule,
        synthetic_acceptance_length=1.5 if setting.rule == "synthetic" else None,
        **dict(setting.options),  # type: ignore[arg-type]
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
        cache = model.allocate_cache(shape.slots + 1, context)
        parts = SpeculatorParts(
            target=model,
            target_cache=cache,
            fixed_width=widths[setting.buckets[-1]][-1] if setting.exact else None,
        )
        if drafter is not None:
            mapping = fake_mapping(config.vocab_size, drafter.vocab_size, device) if foreign else None
            parts = replace(parts, draft=fake_model(drafter, setting.dtype, device), mapping=mapping)
        if setting.head:
            head, states = fake_head(setting.head, model, context)
            parts = replace(parts, head=head, target_states=states)
        if setting.modules:
            modules = fake_modules(model, setting.modules, context)
            parts = replace(parts, head=modules, target_states=(config.num_layers,))
        speculator = create_speculator(speculative, parts)
        if speculator is not None:
            speculator.allocate(state)
        policy = create_policy(speculative)
        policy.allocate(state)
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


def engine_specializations(*, amd: bool = False, sample: bool = False) -> dict[Specialization, tuple[Launch, Setting]]:
    """Every specialisation that any of the `settings` asks for, with the first launch and setting that does."""
    found: dict[Specialization, tuple[Launch, Setting]] = {}
    for setting in sampled_settings(amd) if sample else settings():
        for launch in launches_of(setting, amd=amd):
            found.setdefault(launch.specialization, (launch, setting))
    return found


def jobs_of(kind: tuple[bool, bool]) -> list[tuple[Specialization, str, str]]:
    """For AMD or NVIDIA, sampled or not: each specialisation once, with its op and what it is and who asks for it."""
    amd, sample = kind
    jobs = []
    for specialization, (launch, setting) in engine_specializations(amd=amd, sample=sample).items():
        dtype, method = str(setting.dtype).removeprefix("torch."), setting.method
        asks = f"{setting.checkpoint} in {dtype} with {method if isinstance(method, str) else ', '.join(method)}"
        jobs.append((specialization, launch.op, f"{launch.name} of {asks}, {launch.constants}"))
    return jobs


def compile_all(targets: Sequence[str], *, sample: bool = False) -> Iterator[tuple[str, list[Usage]]]:
    """Compiles every specialisation for every target, one target after another, on all cores."""
    processes = os.cpu_count() or 1
    kinds = sorted({target.startswith("gfx") for target in targets})
    with ProcessPoolExecutor(min(processes, len(kinds)), mp_context=get_context("spawn")) as pool:
        by_kind = dict(zip(kinds, pool.map(jobs_of, [(amd, sample) for amd in kinds]), strict=True))
    for target in targets:
        yield target, compile_jobs([(*job, target) for job in by_kind[target.startswith("gfx")]], processes)


def is_over_budget(usage: Usage) -> bool:
    """Whether a kernel spills, or uses more than every target has."""
    return usage.spills > 0 or usage.registers > 256 or usage.shared > min(SHARED_LIMITS.values())


def main() -> int:
    """The command; its result is the process's exit status."""
    parser = argparse.ArgumentParser(description="Compiles all that an engine asks for.")
    parser.add_argument("--targets", nargs="+", choices=TARGETS, default=TARGETS)
    parser.add_argument("--sample", action="store_true", help="only what ordinary tests compile")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")
    options = parser.parse_args()
    usages: list[Usage] = []
    for target, own in compile_all(options.targets, sample=options.sample):
        usages += own
        spilling, most = sum(usage.spills > 0 for usage in own), max(usage.registers for usage in own)
        print(f"{target}: {len(own)} kernels, {spilling} spill, at most {most} registers", flush=True)
    over = [usage for usage in usages if is_over_budget(usage)]
    for usage in over:
        print(usage)
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(usage) for usage in usages]), encoding="utf-8")
    print(f"{len(over)} of {len(usages)} spill or use too much")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
