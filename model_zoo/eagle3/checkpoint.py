"""Where the tensors of an EAGLE-3 head go."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ..decoder import CompileRegion, DecoderModel
from ..draft_files import DraftTensors
from ..draft_weights import HeadBuilder, layer_placements, own_or_shared, own_or_shared_head
from ..errors import CheckpointError
from ..llama.checkpoint import LAYER_NORMS
from ..placement import Placement
from .config import Eagle3Config
from .model import Eagle3Model, Eagle3Weights

_FIRST = "model.layers.0."


def recognises(hf: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a checkpoint is one."""
    return hf.get("speculators_model_type") == "eagle3" or f"{_FIRST}hidden_norm.weight" in set(names)


def rename(name: str) -> str | None:
    """The name that the shared loader knows a tensor by; None for one that is not needed."""
    if name.endswith("rotary_emb.inv_freq"):
        return None
    name = re.sub(r"^midlayer\.", "layers.0.", name.removeprefix("model."))
    return f"model.{name}" if name.startswith(("layers.", "embed_tokens.")) else name


def placements(config: Eagle3Config) -> dict[str, Placement]:
    """Every tensor by name."""
    hidden, of_target = config.layers.hidden_size, config.target_hidden_size
    found = {
        # The first layer's attention reads the embedding and the hidden state side by side.
        name: p._replace(shape=(p.shape[0], 2 * hidden)) if name.startswith(_FIRST) and p.field == "qkv" else p
        for name, p in layer_placements(config.layers, LAYER_NORMS).items()
    }
    found[f"{_FIRST}input_layernorm.weight"] = Placement("pair_norms", None, 0, (hidden,))
    found[f"{_FIRST}hidden_norm.weight"] = Placement("pair_norms", None, hidden, (hidden,))
    found["norm.weight"] = Placement("final_norm", None, 0, (hidden,))
    if config.has_fc:
        found["fc.weight"] = Placement("fc", None, 0, (hidden, config.state_size))
    if config.fc_bias:
        found["fc.bias"] = Placement("fc_bias", None, 0, (hidden,))
    if config.input_norm:
        found["input_norm.weight"] = Placement("input_norm", None, 0, (config.state_size,))
    if config.fc_norm:
        for index in range(config.aux.count):
            found[f"fc_norm.{index}.weight"] = Placement("fc_norms", None, index * of_target, (of_target,))
    if config.own_embedding:
        found["model.embed_tokens.weight"] = Placement("embedding", None, 0, (config.vocab_size, hidden))
    if config.own_head:
        found["lm_head.weight"] = Placement("head", None, 0, (config.draft_vocab_size, hidden))
    return found


def extras(config: Eagle3Config) -> dict[str, tuple[tuple[int, ...], tuple[str, ...]]]:
    """Tensors that are no weights, by name: their shapes and the types that are accepted."""
    integers = ("I64", "I32")
    found: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
        "d2t": ((config.draft_vocab_size,), integers),
        "t2d": ((config.vocab_size,), ("BOOL", "U8", *integers)),
    }
    if config.mask_token is not None:
        found["mask_hidden"] = ((1, 1, config.state_size), ("BF16", "F16", "F32"))
    return found


def build(
    config: Eagle3Config,
    builder: HeadBuilder,
    tensors: DraftTensors,
    names: Mapping[str, str],
    target: DecoderModel,
    *,
    max_positions: int,
    compile_region: CompileRegion,
) -> Eagle3Model:
    """The head, its weights read, beside its target.

    Raises:
        CheckpointError: d2t points outside of the vocabulary, or contradicts t2d.
    """
    pair_norms, fc_norms, final_norm = (builder.weight(name) for name in ("pair_norms", "fc_norms", "final_norm"))
    assert pair_norms is not None
    assert final_norm is not None
    mask = None
    if config.mask_token is not None:
        mask = tensors.get(names["mask_hidden"]).reshape(config.state_size).to(target.device, target.dtype)
    weights = Eagle3Weights(
        embedding=own_or_shared(builder.weight("embedding"), target),
        pair_norms=pair_norms.unflatten(0, (2, -1)),
        layers=builder.layers(),
        final_norm=final_norm,
        head=own_or_shared_head(builder.weight("head"), target),
        fc=builder.matrix("fc"),
        fc_bias=builder.weight("fc_bias"),
        input_norm=builder.weight("input_norm"),
        fc_norms=None if fc_norms is None else fc_norms.unflatten(0, (config.aux.count, -1)),
    )
    ids = None
    if "d2t" in names and config.draft_vocab_size < config.vocab_size:
        known = tensors.get(names["t2d"]) if "t2d" in names else None
        ids = target_ids(tensors.get(names["d2t"]), known, config.vocab_size).to(target.device)
    return Eagle3Model(
        config,
        target,
        weights,
        target_ids=ids,
        mask_state=mask,
        max_positions=max_positions,
        compile_region=compile_region,
    )


def target_ids(d2t: torch.Tensor, t2d: torch.Tensor | None, vocab_size: int) -> torch.Tensor:
    """The target's id of each token of the head: token i stands for `i + d2t[i]`.

    Args:
        d2t: integers [Vd].
        t2d: [V], true for the tokens that the head can draft, to compare with; None: there is none.
        vocab_size: `V`.

    Returns:
        int32 [Vd].

    Raises:
        CheckpointError: an id outside of the vocabulary, or other tokens than those of t2d.
    """
    ids = torch.arange(len(d2t)) + d2t.long()
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size:
        raise CheckpointError(
            f"d2t, added to the head's tokens, gives ids from {low} to {high}, but the vocabulary has {vocab_size} "
            "tokens: it must hold offsets"
        )
    if t2d is not None and sorted(ids.tolist()) != t2d.nonzero().flatten().tolist():
        raise CheckpointError("d2t, added to the head's tokens, gives other tokens than t2d marks")
    return ids.to(torch.int32)
