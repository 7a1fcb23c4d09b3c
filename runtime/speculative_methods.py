"""The drafting methods of the field: where their drafts come from, and which this version has."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import partial
from types import MappingProxyType
from typing import Any

from ..model_zoo.mtp.config import COUNT_KEYS

MAX_SPECULATIVE_TOKENS = 128
"""The most drafts of one row in one round that a config may ask for."""


class Evidence(Enum):
    """What `confidence` says of a draft, for adaptive verification."""

    NONE = "none"
    """Nothing, and drafts come from no distribution."""
    POSITION = "position"
    """Nothing; drafts are looked up, and how many of them are right can be learned by their position."""
    PROBABILITY = "probability"
    """How probable the drafter holds its likeliest token: what follows for acceptance is learned."""
    SURVIVAL = "survival"
    """The chance that the draft is accepted given that those before it are, by a head that was trained for it."""


UNKNOWN_CONFIDENCE = 0.5
"""What stands for the confidence of a draft of which nothing is known (`Evidence.POSITION`): its feature is 0."""


@dataclass(frozen=True, kw_only=True)
class Method:
    """What the configuration has to know about one drafting method."""

    summary: str
    """One line for tables and messages."""
    available: bool = False
    """Whether this version can run it."""
    needs_model: bool = False
    """Whether `model`, the draft checkpoint, must be named."""
    ships_heads: bool = False
    """Whether draftgraph may come with a checkpoint of it for the target, which is used where `model` names none."""
    depth_from_checkpoint: bool = False
    """Whether the checkpoint may give the number of drafts."""
    checkpoint_depth: Callable[[Mapping[str, Any]], int | None] = lambda config: None
    """Reads the number of drafts from a config.json of the method's own format; None when it does not say."""
    depth_from_tree: bool = False
    """Whether the depth of the suffix tree gives the number of drafts where the user does not."""
    drafts: bool = True
    """Whether it drafts at all."""
    looks_up: bool = False
    """Whether it looks n-grams up, so that the `prompt_lookup` options have defaults."""
    language_model: bool = False
    """Whether `model` is a language model by itself, loaded as a target is."""
    own_vocabulary: bool = False
    """Whether the drafter's vocabulary can be another than the target's."""
    samples_drafts: bool = False
    """Whether it can sample its drafts (`draft_sample_method` "probabilistic")."""
    reads_target: bool = False
    """Whether a draft head that reads the target's hidden states drafts: `model`, or where none need be named a part
    of the target's checkpoint."""
    reads_layers: bool = False
    """Whether it may read any of them, so that a checkpoint numbers layers (`aux_layer_numbering`)."""
    parallel: bool = False
    """Whether there are heads of it that draft all tokens in one pass (`parallel_drafting`)."""
    own_attention: bool = False
    """Whether its layers can have an attention backend of their own (`attention_backend`)."""
    markov: bool = False
    """Whether each draft's logits are corrected by the draft before it (`dspark_draft_topk`)."""
    exits_early: bool = False
    """Whether the target's own first layers draft (`exit_layer`)."""
    user_class: bool = False
    """Whether it is a class of the user's (`speculator`)."""
    evidence: Evidence = Evidence.NONE
    """What its confidences say. Of a user's class the class says it (`BaseSpeculator.evidence`)."""

    @property
    def has_weights(self) -> bool:
        """Whether a checkpoint has weights for it alone."""
        return self.needs_model or self.reads_target

    @property
    def self_sufficient(self) -> bool:
        """Whether the number of drafts is all that it needs to be told."""
        return not (self.has_weights or self.exits_early or self.user_class)


def modules_per_pass(config: Mapping[str, Any]) -> int | None:
    """`n_predict`: how many tokens the checkpoint's prediction modules draft in one turn, or None.

    Args:
        config: a checkpoint's config.json.
    """
    for source in (config, config.get("text_config") or {}):
        for key in COUNT_KEYS:
            value = source.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return None


def _medusa_heads(config: Mapping[str, Any]) -> int | None:
    heads = config.get("medusa_num_heads", config.get("num_heads"))
    return heads if isinstance(heads, int) else None


def _drafts_of_block(config: Mapping[str, Any], *, from_anchor: bool) -> int | None:
    """Drafts of a block, which has one fewer than queries unless the anchor's drafts too.

    `from_anchor` is what the method's own layout means where `sample_from_anchor` is not given; that of speculators
    means False.
    """
    parts = (config.get("dflash_config") or {}, config)
    block = next((part["block_size"] for part in parts if isinstance(part.get("block_size"), int)), None)
    default = from_anchor and config.get("speculators_model_type") is None
    from_anchor = next(
        (bool(p["sample_from_anchor"]) for p in parts if p.get("sample_from_anchor") is not None), default
    )
    return None if block is None else block - (not from_anchor)


METHODS: Mapping[str, Method] = MappingProxyType(
    {
        "none": Method(summary="plain decoding, one token per target pass", available=True, drafts=False),
        "ngram": Method(
            summary="prompt lookup: repeats what followed the same n-gram",
            available=True,
            looks_up=True,
            evidence=Evidence.POSITION,
        ),
        "suffix": Method(
            summary="suffix trees over this request and finished ones",
            available=True,
            depth_from_tree=True,
            evidence=Evidence.PROBABILITY,
        ),
        "draft_model": Method(
            summary="a smaller language model drafts",
            available=True,
            needs_model=True,
            language_model=True,
            own_vocabulary=True,
            samples_drafts=True,
            evidence=Evidence.PROBABILITY,
        ),
        "eagle": Method(
            summary="EAGLE-1 and -2 heads",
            available=True,
            needs_model=True,
            depth_from_checkpoint=True,
            samples_drafts=True,
            reads_target=True,
            evidence=Evidence.PROBABILITY,
        ),
        "eagle3": Method(
            summary="EAGLE-3, EAGLE-3.1 and P-EAGLE heads",
            available=True,
            needs_model=True,
            ships_heads=True,
            depth_from_checkpoint=True,
            samples_drafts=True,
            reads_target=True,
            reads_layers=True,
            parallel=True,
            evidence=Evidence.PROBABILITY,
        ),
        "mtp": Method(
            summary="multi-token-prediction modules of the target",
            available=True,
            depth_from_checkpoint=True,
            checkpoint_depth=modules_per_pass,
            samples_drafts=True,
            reads_target=True,
            evidence=Evidence.PROBABILITY,
        ),
        "medusa": Method(
            summary="Medusa heads",
            available=True,
            needs_model=True,
            depth_from_checkpoint=True,
            checkpoint_depth=_medusa_heads,
            samples_drafts=True,
            reads_target=True,
            evidence=Evidence.PROBABILITY,
        ),
        "dflash": Method(
            summary="DFlash block drafter: one masked pass",
            available=True,
            needs_model=True,
            ships_heads=True,
            depth_from_checkpoint=True,
            checkpoint_depth=partial(_drafts_of_block, from_anchor=False),
            samples_drafts=True,
            reads_target=True,
            reads_layers=True,
            own_attention=True,
            evidence=Evidence.PROBABILITY,
        ),
        "dspark": Method(
            summary="DSpark block drafter with a Markov head",
            available=True,
            needs_model=True,
            ships_heads=True,
            depth_from_checkpoint=True,
            checkpoint_depth=partial(_drafts_of_block, from_anchor=True),
            samples_drafts=True,
            reads_target=True,
            reads_layers=True,
            own_attention=True,
            markov=True,
            evidence=Evidence.SURVIVAL,
        ),
        "layerskip": Method(
            summary="the target's first layers draft",
            available=True,
            exits_early=True,
            samples_drafts=True,
            evidence=Evidence.PROBABILITY,
        ),
        "custom": Method(summary="a class of the user's drafts", available=True, user_class=True),
    }
)
"""Every method by name, plain decoding included."""


def combined(names: Sequence[str]) -> Method:
    """What holds for several methods of which the first that drafts wins; for one, that method.

    Together they draft greedily: verification would have to know which of them a draft was sampled by.

    Args:
        names: keys of `METHODS`.
    """
    methods = [METHODS[name] for name in names]
    if len(methods) == 1:
        return methods[0]
    traits: dict[str, Any] = {
        field.name: any(getattr(method, field.name) for method in methods)
        for field in fields(Method)
        if isinstance(field.default, bool)
    }
    traits |= {"available": all(method.available for method in methods), "samples_drafts": False}
    traits["evidence"] = joint_evidence([method.evidence for method in methods])
    return Method(summary="; else ".join(method.summary for method in methods), **traits)


def joint_evidence(kinds: Sequence[Evidence]) -> Evidence:
    """What the confidences of several methods say together: estimates of one mean nothing for another's drafts."""
    if Evidence.NONE in kinds:
        return Evidence.NONE
    return kinds[0] if len(set(kinds)) == 1 else Evidence.PROBABILITY


def nearest(name: str, accepted: Iterable[str]) -> str:
    """A remark for an error message: the accepted name that `name` is most like; empty when none is close."""
    close = difflib.get_close_matches(name, list(accepted), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


def canonical_method(name: str) -> str:
    """The name that draftgraph uses for a method that other engines also name in another way.

    vLLM configs carry `ngram_gpu` and one `<family>_mtp` per model family.
    """
    if name == "ngram_gpu":
        return "ngram"
    return "mtp" if name.endswith("_mtp") else name


def checkpoint_depth(method: str, config: Mapping[str, Any]) -> int | None:
    """The number of drafts per round that a checkpoint was made for, or None when its config does not say.

    Args:
        method: a key of `METHODS`.
        config: config.json of the checkpoint that holds the drafting weights.
    """
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or []
    for proposal in proposals:
        if isinstance(proposal.get("speculative_tokens"), int):
            return int(proposal["speculative_tokens"])
    return METHODS[method].checkpoint_depth(config)


def vocabulary_size(config: Mapping[str, Any]) -> int | None:
    """`vocab_size` of a config.json, also when it is nested in `text_config`."""
    for source in (config, config.get("text_config") or {}):
        if isinstance(source.get("vocab_size"), int):
            return int(source["vocab_size"])
    return None
