"""From a model's name to a running core: checks first, then weights, then state."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..graphs import (
    DecodeState,
    Executor,
    StateShape,
    choose_executor,
    compile_region,
    eager_region,
    prefill_widths,
    select_executor,
)
from ..graphs.buckets import PREFILL_CHUNK, exact_widths, power_of_two_at_least, verify_widths
from ..kernels.attention_backends import check_backend
from ..kernels.choose_budget import MOST_DRAFTS
from ..kernels.op_observer import ENABLED as OPS_OBSERVABLE
from ..kernels.op_observer import observing_ops
from ..model_zoo.checkpoint import load_model, read_config
from ..model_zoo.config import DecoderConfig
from ..model_zoo.decoder import DecoderModel
from ..model_zoo.draft_checkpoint import load_head
from .adaptive import AdaptiveBudget, Budget, CostTable, FixedBudget
from .adaptive.loading import evidence_of, ready_costs
from .adaptive.rules import lawful_rule
from .cache import cache_directory
from .core import CorePlan, EngineCore
from .draft_loading import DraftSource, LoadedDraft, check_draft, find_draft
from .engine_config import EngineConfig
from .errors import ConfigError
from .head_loading import HeadSource, LoadedHead, check_head, find_head
from .models import resolve_model
from .rounds import RoundBuilder
from .sampling_params import MAX_LOGPROBS, MAX_STOP_TOKEN_IDS
from .shipped_heads import with_shipped_head
from .slots import SlotPool
from .speculative_config import SpeculativeConfig
from .speculative_methods import Evidence
from .speculators import BaseSpeculator, SpeculatorParts, check_custom, create_speculator, speculator_class
from .tokenizer_files import load_tokenizer
from .verification import VerificationPolicy, create_policy

logger = logging.getLogger(__name__)

DEFAULT_MAX_MODEL_LEN = 8192
"""The longest sequence unless the caller asks for more: the KV of every slot is allocated for it."""


@dataclass(frozen=True)
class LoadedModel:
    """A target model in memory, with its tokenizer, where both came from, and its drafter if that has weights."""

    path: Path
    config: DecoderConfig
    model: DecoderModel
    tokenizer: Any
    max_model_len: int
    draft: LoadedDraft | None = None
    head: LoadedHead | None = None
    speculative: SpeculativeConfig | None = None
    """With the number of drafts that the checkpoint gives, where the user gives none; None: as it was configured."""


def check_target(
    name: str | Path, config: EngineConfig, progress: Callable[[int, int, str], None] | None = None
) -> tuple[Path, DecoderConfig, int]:
    """Resolves a target model and checks it against the settings, cheapest checks first; no weight is read.

    Returns:
        Its local directory, its config, and the most tokens of a sequence.
    """
    found = _find_models(name, config, progress)
    return found.path, found.config, found.max_model_len


@dataclass(frozen=True)
class _Found:
    """A target model and its drafter that fit each other and the settings, before any weight is read."""

    path: Path
    config: DecoderConfig
    max_model_len: int
    speculative: SpeculativeConfig
    draft: DraftSource | None
    head: HeadSource | None
    target_states: tuple[int, ...]


def _find_models(name: str | Path, config: EngineConfig, progress: Callable[[int, int, str], None] | None) -> _Found:
    """Resolves and checks a target model and its drafter, cheapest checks first."""
    config.speculative.require_available()
    if config.speculative.speculator is not None:
        speculator_class(config.speculative.speculator)
    evidence_of(config.speculative)
    _check_executor(config)
    try:
        check_backend(config.speculative.attention_backend, config.torch_device.type)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if config.exact:
        _widths(config, config.speculative.num_speculative_tokens or 0)
    if not isinstance(name, str | Path):
        raise ConfigError(f"model must be the name or path of a model, got {name!r}")
    path = resolve_model(name, progress=progress)
    decoder = read_config(path)
    speculative = with_shipped_head(config.speculative, name, path)
    draft, head = find_draft(speculative, progress), find_head(speculative, path, progress)
    hf_config = json.loads((path / "config.json").read_text())
    drafter = draft or head
    speculative = speculative.check_checkpoint(hf_config, None if drafter is None else drafter.hf_config)
    num_drafts = speculative.num_speculative_tokens or 0
    _widths(config, num_drafts)
    _check_tile(config, speculative)
    target_states = () if head is None else check_head(head, decoder, speculative)
    speculative.check_layers(decoder.num_layers)
    max_model_len = _max_model_len(config, decoder, draft)
    if num_drafts >= max_model_len:
        raise ConfigError(
            f"num_speculative_tokens is {num_drafts}, but a sequence has at most {max_model_len} tokens "
            f"(max_model_len): use at most {max_model_len - 1}"
        )
    if config.speculative.speculator is not None:
        check_custom(
            config.speculative.speculator,
            _state_shape(config, speculative, decoder, max_model_len),
            hidden_size=decoder.hidden_size,
            num_layers=decoder.num_layers,
            dtype=config.torch_dtype,
            buckets=config.buckets,
        )
    return _Found(path, decoder, max_model_len, speculative, draft, head, target_states)


def load_target(
    name: str | Path, config: EngineConfig, progress: Callable[[int, int, str], None] | None
) -> LoadedModel:
    """Resolves, checks and loads a target model and its drafter."""
    found = _find_models(name, config, progress)
    draft, head, max_model_len = found.draft, found.head, found.max_model_len
    tokenizer = load_tokenizer(found.path)
    mapping = None if draft is None else check_draft(draft, found.path, found.config, found.speculative)
    region = compile_region if config.compile else eager_region

    def load(directory: Path) -> DecoderModel:
        return load_model(
            directory,
            dtype=config.torch_dtype,
            device=config.torch_device,
            compile_region=region,
            max_positions=max_model_len,
            progress=progress,
        )

    model = load(found.path)
    loaded = None if draft is None else LoadedDraft(load(draft.path), mapping)
    loaded_head = None
    if head is not None:
        heads = load_head(
            head.checkpoint,
            model,
            max_positions=max_model_len,
            compile_region=region,
            progress=progress,
            attention_backend=config.speculative.attention_backend,
        )
        loaded_head = LoadedHead(heads, found.target_states)
    return LoadedModel(
        found.path, found.config, model, tokenizer, max_model_len, loaded, loaded_head, found.speculative
    )


def build_core(
    target: LoadedModel,
    config: EngineConfig,
    *,
    executor: Executor | None = None,
    ring: int | None = None,
    rounds_per_launch: int | None = None,
    costs: CostTable | None = None,
) -> EngineCore:
    """Allocates the decode state and the cache, and assembles the loop around them.

    Args:
        target: the model.
        config: checked by `load_target`.
        executor: in place of the one that the configuration names.
        ring: tokens of a row's output ring; by default as many as a sequence may have.
        rounds_per_launch: see `CorePlan`.
        costs: what rounds cost, for adaptive verification; by default measured, unless an earlier process did so.
    """
    device = config.torch_device
    speculative = config.speculative
    known = target.speculative
    if known is not None and speculative.num_speculative_tokens is None and speculative.method == known.method:
        speculative = known
    widths = _widths(config, speculative.num_speculative_tokens or 0)
    shape = _state_shape(config, speculative, target.config, target.max_model_len, ring)
    state = DecodeState.allocate(shape, dtype=config.torch_dtype, device=device)
    cache = target.model.allocate_cache(state.shape.slots + 1, state.shape.context)
    parts = SpeculatorParts(
        draft=None if target.draft is None else target.draft.model,
        mapping=None if target.draft is None else target.draft.mapping,
        target=target.model,
        target_cache=cache,
        head=None if target.head is None else target.head.model,
        target_states=() if target.head is None else target.head.target_states,
        fixed_width=widths[config.buckets[-1]][-1] if config.exact else None,
    )
    speculator = create_speculator(speculative, parts)
    if speculator is not None:
        speculator.allocate(state)
    _set_draft_limit(state, speculative)
    policy = create_policy(speculative)
    policy.allocate(state)
    budget = create_budget(state, speculative, speculator, policy)
    builder = RoundBuilder(target.model, cache, state, speculator, policy, budget)
    reuse = (PREFILL_CHUNK if config.exact else 1) if config.prefix_caching else None
    plan = CorePlan(
        buckets=config.buckets,
        widths=widths,
        prefill_widths=prefill_widths(config.exact),
        metrics=config.metrics,
        max_logprobs=MAX_LOGPROBS,
        reuse_generated=not config.exact,
        budget_rule=budget.rule.name if isinstance(budget, AdaptiveBudget) else None,
        **({} if rounds_per_launch is None else {"rounds_per_launch": rounds_per_launch}),
    )
    executor = executor or _executor(config)
    lookahead = 0 if speculator is None else speculator.lookahead
    slots = SlotPool(config.max_batch_size, reuse_multiple=reuse, lookahead=lookahead)
    core = EngineCore(state, builder, speculator, executor, slots, plan)
    if isinstance(budget, AdaptiveBudget):
        model = f"{target.path} {target.config}"
        budget.set_costs(costs or ready_costs(core, config, speculative, model=model), widths)
    return core


def create_budget(
    state: DecodeState,
    speculative: SpeculativeConfig,
    speculator: BaseSpeculator | None,
    policy: VerificationPolicy,
) -> Budget:
    """What decides how many drafts are made and verified: of fixed depth, or adaptive by a rule that is lawful.

    Args:
        state: of the engine.
        speculative: the settings.
        speculator: what drafts, allocated; None for plain decoding.
        policy: how drafts are judged.
    """
    if speculator is None or not speculative.enable_adaptive_verification:
        return FixedBudget(state, varies_depth=speculative.num_speculative_tokens_per_batch_size is not None)
    rule = lawful_rule(
        policy,
        samples_drafts=speculative.draft_sample_method == "probabilistic",
        confidence_reads_drafts=speculator.confidence_reads_drafts,
    )
    evidence = evidence_of(speculative)
    if evidence is Evidence.SURVIVAL and speculator.draft_confidence is None and speculative.speculator is None:
        evidence = Evidence.PROBABILITY  # a checkpoint without the head that it would come from
    return AdaptiveBudget(state, evidence=evidence, rule=rule, confidence=speculator.draft_confidence)


def _check_tile(config: EngineConfig, speculative: SpeculativeConfig) -> None:
    """Adaptive verification compares all drafts of a round in one block of the device."""
    rows, drafts = config.buckets[-1], speculative.num_speculative_tokens or 1
    entries = power_of_two_at_least(rows) * power_of_two_at_least(drafts)
    if speculative.enable_adaptive_verification and entries > MOST_DRAFTS:
        raise ConfigError(
            f"enable_adaptive_verification with {rows} rows of {drafts} drafts; accepted: at most {MOST_DRAFTS} drafts "
            "of all rows, both numbers rounded up to powers of two"
        )


def _state_shape(
    config: EngineConfig,
    speculative: SpeculativeConfig,
    decoder: DecoderConfig,
    max_model_len: int,
    ring: int | None = None,
) -> StateShape:
    num_drafts = speculative.num_speculative_tokens or 0
    return StateShape(
        slots=config.buckets[-1],
        context=max_model_len,
        num_drafts=num_drafts,
        vocab_size=decoder.vocab_size,
        max_bucket=config.buckets[-1],
        max_width=max(widths[-1] for widths in _widths(config, num_drafts).values()),
        max_stop_tokens=MAX_STOP_TOKEN_IDS + len(decoder.eos_token_ids),
        keeps_draft_probs=speculative.keeps_draft_probs,
        ring=ring or 0,
    )


def _check_executor(config: EngineConfig) -> None:
    try:
        select_executor(config.executor, config.torch_device, cache_directory())
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _executor(config: EngineConfig) -> Executor:
    _check_executor(config)
    observe_ops = observing_ops if OPS_OBSERVABLE else None
    return choose_executor(config.executor, config.torch_device, cache_directory(), observe_ops)


def _widths(config: EngineConfig, num_drafts: int) -> dict[int, tuple[int, ...]]:
    try:
        choose = exact_widths if config.exact else verify_widths
        return {bucket: choose(bucket, num_drafts) for bucket in config.buckets}
    except ValueError as error:
        raise ConfigError(str(error)) from None


def _max_model_len(config: EngineConfig, decoder: DecoderConfig, draft: DraftSource | None) -> int:
    most = decoder.max_position_embeddings
    asked = config.max_model_len
    if asked is not None and asked > most:
        raise ConfigError(f"max_model_len is {asked}, but the model was made for at most {most} tokens")
    length = min(most, DEFAULT_MAX_MODEL_LEN) if asked is None else asked
    if draft is None or draft.config.max_position_embeddings >= length:
        return length
    most = draft.config.max_position_embeddings
    if asked is not None:
        raise ConfigError(
            f"max_model_len is {asked}, but the draft model {draft.name} was made for at most {most} tokens"
        )
    logger.warning("sequences have at most %d tokens: the draft model %s was made for no more", most, draft.name)
    return most


def _set_draft_limit(state: DecodeState, speculative: SpeculativeConfig) -> None:
    """Fills the table of the most drafts per row by the number of live rows."""
    limits = speculative.draft_limits(state.shape.max_bucket)
    state.draft_limit.copy_(torch.tensor(limits, dtype=torch.int32))
