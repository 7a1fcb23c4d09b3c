"""`SpeculativeConfig`: which drafts are made, how they are judged, and every rule that the two must keep."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..kernels.attention_backends import BACKENDS, canonical_backend
from ..kernels.suffix_index import LONGEST
from ..model_zoo.draft_config import NUMBERINGS
from ..model_zoo.json_text import parse_json
from .checks import check_bool, check_choice, check_integer, check_number
from .errors import ConfigError, NotAvailableError
from .speculative_methods import (
    MAX_SPECULATIVE_TOKENS,
    METHODS,
    Evidence,
    Method,
    canonical_method,
    checkpoint_depth,
    combined,
    modules_per_pass,
    nearest,
    vocabulary_size,
)

DRAFT_SAMPLE_METHODS = ("greedy", "probabilistic")
REJECTION_SAMPLE_METHODS = ("standard", "block", "synthetic", "coupled")

_DISTRIBUTION_RULES = ("standard", "block")
"""Verification rules that need the distribution of a draft that was sampled."""

_UNAVAILABLE_OPTIONS = ("use_local_argmax_reduction",)
"""Options whose every value but the default is refused by `require_available` in this version."""

_LEAST = {
    "num_speculative_tokens": 1,
    "prompt_lookup_min": 1,
    "prompt_lookup_max": 1,
    "dspark_draft_topk": 1,
    "adaptive_profile_context_len": 1,
    "exit_layer": 1,
    "suffix_decoding_max_tree_depth": 1,
    "suffix_decoding_max_cached_requests": 0,
}
"""The least value of each integer option."""

_MOST = {"num_speculative_tokens": MAX_SPECULATIVE_TOKENS, "suffix_decoding_max_tree_depth": LONGEST}
"""The most, where there is a limit."""


@dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """How to speculate. The names are those of vLLM's `speculative_config`, so that a config carries over.

    Every rule that needs no checkpoint is checked on construction.

    Raises:
        ConfigError: a value of the wrong type or out of its range, or two options that contradict each other.
    """

    method: str | tuple[str, ...] = "none"
    """A key of `METHODS`; "none" is plain decoding. Of several, in a list, the first that drafts for a row wins."""
    model: str | None = None
    """The draft checkpoint: a directory, a hub id, or a head that comes with draftgraph, such as "eagle3@smollm2-135m".
    None: the head that comes with draftgraph for the target, if there is one. Methods without a checkpoint of their own
    take none."""
    num_speculative_tokens: int | None = None
    """`K`, the most drafts of one row in one round. None where the checkpoint or the tree depth gives it."""
    prompt_lookup_max: int | None = None
    """ngram: the longest n-gram looked up, in tokens. Default 4, or `prompt_lookup_min` if that is larger."""
    prompt_lookup_min: int | None = None
    """ngram: the shortest n-gram looked up. Default 2, or `prompt_lookup_max` if that is smaller."""
    draft_sample_method: str = "greedy"
    """"greedy": a draft is the drafter's argmax. "probabilistic": it is sampled."""
    rejection_sample_method: str = "standard"
    """"standard" and "block" keep the target's distribution; "coupled" keeps the very text of a seed;
    "synthetic" ignores the logits and serves benchmarks only."""
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    """synthetic: `K` values in [0, 1], non-increasing: the share of rounds that accept drafts 1 to i."""
    synthetic_acceptance_length: float | None = None
    """synthetic: the mean acceptance length, in [1, K + 1] tokens per round."""
    use_heterogeneous_vocab: bool = False
    """draft_model: the drafter has another vocabulary; drafts are limited to the tokens both share."""
    use_local_argmax_reduction: bool = False
    """Greedy drafting over a sharded vocabulary exchanges argmaxes instead of logits."""
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None
    """Inclusive `(first, last, K)` ranges of live rows; gaps carry the previous K; K = 0: no drafts."""
    parallel_drafting: bool = False
    """eagle3: the head must draft all tokens in one masked pass (P-EAGLE). Heads that were made for it do so anyway."""
    aux_layer_numbering: str | None = None
    """eagle3, dflash, dspark: how the checkpoint numbers the target's layers: "hidden_states" (0 is the embedding) or
    "layer_outputs" (0 is the first layer's output). None: as its format does."""
    enable_adaptive_verification: bool = False
    """Choose per round how many drafts are worth verifying, and worth making, from their confidence."""
    adaptive_profile_context_len: int = 8192
    """adaptive: the context at which the costs of drafting and verifying are measured; the engine's, if shorter."""
    dspark_draft_topk: int | None = None
    """dspark: only this many of the base logits compete. None: all of them."""
    attention_backend: str | None = None
    """dflash, dspark: the attention backend of the drafter: "sdpa" on the CPU, "triton" on a GPU, "reference" on both.
    None or "auto": the device's own, which is the target's."""
    suffix_decoding_max_tree_depth: int = 24
    """suffix: the longest suffix kept, in tokens, at most 64."""
    suffix_decoding_max_cached_requests: int = 10000
    """suffix: finished requests that the global tree keeps at most, first in first out; 0 turns it off."""
    suffix_decoding_max_spec_factor: float = 1.0
    """suffix: drafts allowed per matched token."""
    suffix_decoding_min_token_prob: float = 0.1
    """suffix: drafting stops below this estimated probability, in [0, 1]."""
    exit_layer: int | None = None
    """layerskip: how many of the target's layers draft, from 1 to all."""
    speculator: str | None = None
    """custom: the class that drafts, as "package.module:Class", or the name of an entry point."""

    @classmethod
    def parse(cls, value: SpeculativeConfig | Mapping[str, Any] | str | None) -> SpeculativeConfig:
        """A config from what a user may give.

        Args:
            value: a config, a mapping of its options, the same as a JSON object, or None for plain decoding.

        Raises:
            ConfigError: not one of these, an unknown key (the nearest is named), or a broken rule.
        """
        if value is None:
            return cls()
        if isinstance(value, SpeculativeConfig):
            return value
        options = _parse_json(value) if isinstance(value, str) else value
        if not isinstance(options, Mapping):
            raise ConfigError(f"speculative_config must be a SpeculativeConfig, a dict, JSON or None, got {options!r}")
        accepted = [field.name for field in dataclasses.fields(cls)]
        for key in options:
            if key not in accepted:
                raise ConfigError(
                    f"speculative_config has no option {key!r}{nearest(str(key), accepted)}; "
                    f"options: {', '.join(accepted)}"
                )
        if options and "method" not in options:
            raise ConfigError(f"speculative_config names no method; methods: {', '.join(METHODS)}")
        return cls(**options)

    def __post_init__(self) -> None:
        self._check_types()
        self._check_method()
        self._fill_defaults()
        self._check_drafting()
        self._check_adaptive()
        self._check_synthetic()
        if self.num_speculative_tokens_per_batch_size is not None:
            ranges = _checked_ranges(self.num_speculative_tokens_per_batch_size, self._depth)
            self._set("num_speculative_tokens_per_batch_size", ranges)

    def check_checkpoint(
        self, target_config: Mapping[str, Any], draft_config: Mapping[str, Any] | None = None
    ) -> SpeculativeConfig:
        """Checks the rules that need the checkpoints, on their config.json alone, before any weight is read.

        Args:
            target_config: config.json of the target.
            draft_config: config.json of the draft checkpoint; None when the method has none of its own.

        Returns:
            This config, with `num_speculative_tokens` filled in where the checkpoint gives it.

        Raises:
            ConfigError: K given by neither the config nor the checkpoint, K that is not a multiple of the
                checkpoint's `n_predict` when larger, or vocabularies that differ.
        """
        method = self.traits
        if not method.drafts:
            return self
        if method.needs_model and draft_config is None:
            raise ConfigError(f"method {self.method!r} needs the config.json of its draft {self.model!r}")
        source = target_config if draft_config is None else draft_config
        depth = self.num_speculative_tokens
        if depth is None:
            found = (checkpoint_depth(name, source) for name in self.methods)
            depth = next((depth for depth in found if depth is not None), None)
        if depth is None:
            raise ConfigError(
                f"method {self.method!r} needs num_speculative_tokens (K): its checkpoint does not give it"
            )
        predicted = modules_per_pass(source) if method.depth_from_checkpoint else None
        if predicted is not None and depth > predicted and depth % predicted:
            raise ConfigError(
                f"num_speculative_tokens is {depth}, but the checkpoint predicts n_predict = {predicted} "
                f"tokens in one turn: use at most {predicted}, or a multiple of it"
            )
        if method.own_vocabulary and draft_config is not None and not self.use_heterogeneous_vocab:
            ours, theirs = vocabulary_size(target_config), vocabulary_size(draft_config)
            if ours != theirs:
                raise ConfigError(
                    f"the target's vocabulary has {ours} tokens and the draft model's {theirs}: use a draft "
                    "model with the target's tokenizer, or set use_heterogeneous_vocab"
                )
        return dataclasses.replace(self, num_speculative_tokens=depth)

    def check_layers(self, num_layers: int) -> None:
        """Checks the options that name layers of the target; raises `ConfigError` for one that it has not."""
        if self.exit_layer is not None and self.exit_layer > num_layers:
            raise ConfigError(f"exit_layer must be from 1 to {num_layers}, the target's layers, got {self.exit_layer}")

    def require_available(self) -> None:
        """Checks that this version has the method and every option that is set.

        Raises:
            NotAvailableError: it does not; the message lists what is available.
        """
        methods = ", ".join(repr(name) for name, method in METHODS.items() if method.available)
        for name in self.methods:
            if not METHODS[name].available:
                raise NotAvailableError(
                    f"method {name!r} ({METHODS[name].summary}) is not available in this version; available: {methods}"
                )
        if self.draft_sample_method != "greedy" and not self.traits.samples_drafts:
            raise NotAvailableError(
                f"draft_sample_method {self.draft_sample_method!r} is not available with method "
                f"{self.method!r}, which does not sample its drafts; available: 'greedy'"
            )
        if self.parallel_drafting and not self.traits.parallel:
            fitting = ", ".join(repr(name) for name, method in METHODS.items() if method.parallel)
            raise NotAvailableError(
                f"parallel_drafting is not available with method {self.method!r} in this version; available: its "
                f"default, False, or the methods {fitting}"
            )
        for field in dataclasses.fields(self):
            if field.name in _UNAVAILABLE_OPTIONS and getattr(self, field.name) != field.default:
                raise NotAvailableError(
                    f"{field.name} is not available in this version; available: its default, "
                    f"{field.default!r}, with the methods {methods}"
                )

    @property
    def methods(self) -> tuple[str, ...]:
        """Keys of `METHODS`: the one method, or those of which the first that drafts wins."""
        return (self.method,) if isinstance(self.method, str) else self.method

    @property
    def traits(self) -> Method:
        """What holds for the methods together."""
        return combined(self.methods)

    @property
    def keeps_draft_probs(self) -> bool:
        """Whether verification needs the distribution that each draft was sampled from."""
        return self.draft_sample_method == "probabilistic" and self.rejection_sample_method in _DISTRIBUTION_RULES

    @property
    def _depth(self) -> int | None:
        """`K`, as far as it is known: without a method that drafts it is 0."""
        return self.num_speculative_tokens if self.traits.drafts else 0

    def draft_limits(self, max_rows: int) -> tuple[int, ...]:
        """The most drafts per row for 0 to `max_rows` live rows: `max_rows + 1` values.

        Without `num_speculative_tokens_per_batch_size` every value is `num_speculative_tokens`.
        """
        limits = [self.num_speculative_tokens or 0] * (max_rows + 1)
        # Ranges are sorted: one that starts later overwrites the tail, so that gaps carry the previous K.
        for first, _, depth in self.num_speculative_tokens_per_batch_size or ():
            start = 0 if first == 1 else first
            limits[start:] = [depth] * len(limits[start:])
        return tuple(limits)

    def to_dict(self) -> dict[str, Any]:
        """The method and the options that differ from their defaults, ready for JSON and for `parse`."""
        changed = {"method": self.method}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                changed[field.name] = _as_lists(value)
        return changed

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_types(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(field.default, bool):
                check_bool(ConfigError, field.name, value)
            elif field.name in _LEAST and not (value is None and field.default is None):
                check_integer(ConfigError, field.name, value, _LEAST[field.name], _MOST.get(field.name))
        for name in ("model", "attention_backend", "speculator"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                raise ConfigError(f"{name} must be a non-empty string or None, got {value!r}")
        if self.aux_layer_numbering is not None:
            check_choice(ConfigError, "aux_layer_numbering", self.aux_layer_numbering, NUMBERINGS)
        check_choice(ConfigError, "draft_sample_method", self.draft_sample_method, DRAFT_SAMPLE_METHODS)
        check_choice(ConfigError, "rejection_sample_method", self.rejection_sample_method, REJECTION_SAMPLE_METHODS)
        factor, least = self.suffix_decoding_max_spec_factor, self.suffix_decoding_min_token_prob
        check_number(ConfigError, "suffix_decoding_max_spec_factor", factor, 0.0)
        check_number(ConfigError, "suffix_decoding_min_token_prob", least, 0.0, 1.0)

    def _check_method(self) -> None:
        self._set("method", _checked_methods(self.method))
        traits, shown = self.traits, self.method
        for option, needed, what in (
            ("model", traits.needs_model and not traits.ships_heads, "the draft's directory or hub id"),
            ("exit_layer", traits.exits_early, "how many of the target's layers draft"),
            ("speculator", traits.user_class, 'the class that drafts, as "package.module:Class"'),
        ):
            if needed and getattr(self, option) is None:
                raise ConfigError(f"method {shown!r} needs {option}, {what}")
        for option, fits in (("exit_layer", "exits_early"), ("speculator", "user_class")):
            if getattr(self, option) is not None and not getattr(traits, fits):
                fitting = ", ".join(repr(name) for name, method in METHODS.items() if getattr(method, fits))
                raise ConfigError(f"{option} needs method {fitting}, got {shown!r}")
        if self.model is not None and not (traits.needs_model or traits.depth_from_checkpoint or self.model == shown):
            # vLLM itself writes the name of the method "ngram" there.
            fitting = ", ".join(repr(name) for name, method in METHODS.items() if method.needs_model)
            raise ConfigError(f"model is {self.model!r}, but method {shown!r} takes none; methods with one: {fitting}")
        if not traits.drafts and self.num_speculative_tokens is not None:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, but method {shown!r} makes none: "
                "leave it out, or name a method"
            )

    def _fill_defaults(self) -> None:
        method = self.traits
        if method.looks_up:
            shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
            if longest is None:
                longest = max(4, shortest or 0)
            if shortest is None:
                shortest = min(2, longest)
            self._set("prompt_lookup_max", longest)
            self._set("prompt_lookup_min", shortest)
        if method.depth_from_tree and self.num_speculative_tokens is None:
            # As in vLLM: a suffix can be followed as far as the tree is deep.
            deepest = min(self.suffix_decoding_max_tree_depth, MAX_SPECULATIVE_TOKENS)
            self._set("num_speculative_tokens", deepest)
        known_later = not method.drafts or method.depth_from_checkpoint
        if self.num_speculative_tokens is None and not known_later:
            raise ConfigError(
                f"method {self.method!r} needs num_speculative_tokens (K), the most drafts per round: an "
                f"integer from 1 to {MAX_SPECULATIVE_TOKENS}"
            )

    def _check_drafting(self) -> None:
        shortest, longest = self.prompt_lookup_min, self.prompt_lookup_max
        if shortest is not None and longest is not None and shortest > longest:
            raise ConfigError(f"prompt_lookup_min ({shortest}) must not exceed prompt_lookup_max ({longest})")
        if self.use_heterogeneous_vocab and not self.traits.own_vocabulary:
            fitting = ", ".join(repr(name) for name, method in METHODS.items() if method.own_vocabulary)
            raise ConfigError(f"use_heterogeneous_vocab needs method {fitting}, got {self.method!r}")
        if self.aux_layer_numbering is not None and not self.traits.reads_layers:
            fitting = ", ".join(repr(name) for name, method in METHODS.items() if method.reads_layers)
            raise ConfigError(f"aux_layer_numbering needs method {fitting}, got {self.method!r}")
        for name, fits in (("dspark_draft_topk", "markov"), ("attention_backend", "own_attention")):
            if getattr(self, name) is not None and not getattr(self.traits, fits):
                fitting = ", ".join(repr(method) for method, traits in METHODS.items() if getattr(traits, fits))
                raise ConfigError(f"{name} needs method {fitting}, got {self.method!r}")
        if self.attention_backend is not None:
            backend = canonical_backend(self.attention_backend)
            if backend is not None:
                check_choice(ConfigError, "attention_backend", backend, tuple(BACKENDS))
            self._set("attention_backend", backend)
        if self.draft_sample_method == "probabilistic":
            for name, reason in (
                ("use_heterogeneous_vocab", "the draft's probabilities mean nothing in another vocabulary"),
                ("use_local_argmax_reduction", "it keeps argmaxes and no probabilities"),
            ):
                if getattr(self, name):
                    raise ConfigError(f"{name} needs draft_sample_method 'greedy', got 'probabilistic': {reason}")

    def _check_adaptive(self) -> None:
        if not self.enable_adaptive_verification:
            return
        if not self.traits.drafts:
            raise ConfigError(f"enable_adaptive_verification needs a method that drafts, got {self.method!r}")
        for name in self.methods:
            if METHODS[name].evidence is Evidence.NONE and not METHODS[name].user_class:
                fitting = ", ".join(repr(n) for n, method in METHODS.items() if method.evidence is not Evidence.NONE)
                raise ConfigError(
                    f"enable_adaptive_verification needs drafts with a confidence or a distribution, and method "
                    f"{name!r} gives neither; accepted: {fitting}"
                )

    def _check_synthetic(self) -> None:
        options = ("synthetic_acceptance_rates", "synthetic_acceptance_length")
        given = [name for name in options if getattr(self, name) is not None]
        if self.rejection_sample_method != "synthetic":
            if given:
                raise ConfigError(
                    f"{given[0]} needs rejection_sample_method 'synthetic', and cannot go together with "
                    f"{self.rejection_sample_method!r}"
                )
            return
        if len(given) != 1:
            raise ConfigError(
                f"rejection_sample_method 'synthetic' needs exactly one of {' and '.join(options)}, got "
                f"{'both' if given else 'neither'}"
            )
        depth = self._depth
        if self.synthetic_acceptance_rates is not None:
            rates = _checked_rates(self.synthetic_acceptance_rates, depth)
            self._set("synthetic_acceptance_rates", rates)
        else:
            most = MAX_SPECULATIVE_TOKENS if depth is None else depth
            check_number(ConfigError, options[1], self.synthetic_acceptance_length, 1, most + 1)


def _checked_methods(given: object) -> str | tuple[str, ...]:
    """The methods by the names that draftgraph uses; a list of one is that one."""
    several = isinstance(given, (list, tuple))
    names = [given] if not isinstance(given, (list, tuple)) else list(given)
    known = ", ".join(METHODS)
    found: list[str] = []
    for name in names:
        if not isinstance(name, str):
            raise ConfigError(f"method must be one of {known}, or a list of these, got {given!r}")
        method = canonical_method(name)
        if method not in METHODS:
            raise ConfigError(f"unknown method {method!r}{nearest(method, METHODS)}; methods: {known}")
        if method in found:
            raise ConfigError(f"method names {method!r} twice: {given!r}; name each method once")
        found.append(method)
    if not found:
        raise ConfigError(f"method is an empty list; name one or more of {known}")
    if len(found) == 1:
        return found[0]
    idle = [name for name in found if not METHODS[name].drafts]
    if several and idle:
        drafting = ", ".join(name for name, method in METHODS.items() if method.drafts)
        raise ConfigError(f"method {idle[0]!r} drafts nothing, so it has no place in a list, got {given!r}: {drafting}")
    sources = [name for name in found if METHODS[name].has_weights]
    if len(sources) > 1:
        raise ConfigError(
            f"method names {' and '.join(map(repr, sources))}, which each need a model; accepted: one such"
        )
    return tuple(found)


def _parse_json(text: str) -> object:
    try:
        return parse_json(text)
    except ValueError as error:
        raise ConfigError(
            f"speculative_config is not JSON ({error}): {text!r}; an example: "
            '{"method": "ngram", "num_speculative_tokens": 8}'
        ) from None


def _checked_rates(rates: object, depth: int | None) -> tuple[float, ...]:
    name = "synthetic_acceptance_rates"
    if not isinstance(rates, (list, tuple)):
        raise ConfigError(f"{name} must be a list of numbers in [0, 1], got {rates!r}")
    for rate in rates:
        check_number(ConfigError, f"each of {name}", rate, 0.0, 1.0)
    if depth is not None and len(rates) != depth:
        raise ConfigError(f"{name} needs num_speculative_tokens = {depth} values, got {len(rates)}: {rates!r}")
    if any(after > before for before, after in itertools.pairwise(rates)):
        raise ConfigError(f"{name} must not increase (rate i is the share that accepts drafts 1 to i), got {rates!r}")
    return tuple(float(rate) for rate in rates)


def _checked_ranges(ranges: object, depth: int | None) -> tuple[tuple[int, int, int], ...]:
    name = "num_speculative_tokens_per_batch_size"
    expected = f"{name} must be a list of [first, last, K] with 1 <= first <= last and K >= 0"
    if not isinstance(ranges, (list, tuple)) or not ranges:
        raise ConfigError(f"{expected}, got {ranges!r}")
    for entry in ranges:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3:
            raise ConfigError(f"{expected}, got {entry!r}")
        integers = all(isinstance(part, int) and not isinstance(part, bool) for part in entry)
        if not integers or not 1 <= entry[0] <= entry[1] or entry[2] < 0:
            raise ConfigError(f"{expected}, got {entry!r}")
        if depth is not None and entry[2] > depth:
            raise ConfigError(f"{name}: K of {list(entry)} exceeds num_speculative_tokens ({depth})")
    ordered = tuple(sorted((first, last, k) for first, last, k in ranges))
    if ordered[0][0] != 1:
        raise ConfigError(f"{name} must start at 1 row, got {list(ordered[0])} as its first range")
    for before, after in itertools.pairwise(ordered):
        if after[0] <= before[1]:
            raise ConfigError(f"{name}: the ranges {list(before)} and {list(after)} overlap")
    return ordered


def _as_lists(value: Any) -> Any:
    return [_as_lists(part) for part in value] if isinstance(value, tuple) else value
