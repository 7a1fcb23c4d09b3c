"""DFlash and DSpark checkpoints with the published names, and the mathematics of both written down plainly.

Like those of `draft_heads`, the transcriptions take a whole sequence, without cache, windows or packing, and share no
code with the package.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from draft_heads import (
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KV_HEADS,
    LAYERS,
    LLAMA,
    THETA,
    Draft,
    Maker,
    Tensors,
    decoder_tensors,
    rms,
    target_id,
)
from draft_heads import drafted as drafted

MASK, RANK = 7, 6


def dflash(
    vocab: int,
    *,
    seed: int = 4,
    speculators: bool = False,
    layers: int = 2,
    ids: list[int] | None = None,
    block: int = 6,
    draft_vocab: int | None = None,
    own: bool = False,
    sliding: int = 0,
    causal: bool | None = None,
    non_causal: bool | None = None,
    from_anchor: bool | None = None,
    mask_embedding: bool = False,
    norms: bool = True,
    nested: bool = True,
    sharpness: float = 3.0,
    swa: int = 0,
    options: dict[str, Any] | None = None,
) -> Draft:
    """A DFlash drafter of either layout; `sliding`: the first layer slides over so many positions; `swa`: all do."""
    make = Maker(seed)
    ids = ids or [1, 3, 5]
    states = tuple(ids) if speculators else tuple(i + 1 for i in ids)
    tensors: Tensors = {"fc.weight": make.matrix(HIDDEN, len(ids) * HIDDEN), "hidden_norm.weight": make.norm(HIDDEN)}
    tensors["norm.weight"] = make.norm(HIDDEN)
    for index in range(layers):
        tensors |= decoder_tensors(make, f"layers.{index}", qk=norms)
        tensors[f"layers.{index}.input_layernorm.weight"] = make.norm(HIDDEN)
    size = draft_vocab or vocab
    if own or draft_vocab:
        tensors["lm_head.weight"] = make.matrix(size, HIDDEN, sharpness)
    if own:
        tensors["embed_tokens.weight"] = make.matrix(vocab, HIDDEN)
    if draft_vocab is not None:
        chosen = torch.arange(vocab)[:: max(1, vocab // draft_vocab)][:draft_vocab]
        tensors["d2t"] = chosen - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(vocab, dtype=torch.bool).index_fill(0, chosen, True)
    inner: dict[str, Any] = {**LLAMA, "model_type": "qwen3" if norms else "llama", "vocab_size": vocab}
    inner |= {"num_hidden_layers": layers}
    if sliding:
        inner |= {"sliding_window": sliding, "use_sliding_window": True}
        inner["layer_types"] = ["sliding_attention", *["full_attention"] * (layers - 1)]
    if speculators:
        config = {
            "speculators_model_type": "dflash",
            "architectures": ["DFlashSpeculator"],
            "transformer_layer_config": inner,
            "speculators_config": {
                "algorithm": "dflash",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
                "verifier": {"name_or_path": "some/verifier", "architectures": ["LlamaForCausalLM"]},
            },
            "aux_hidden_state_layer_ids": ids,
            "mask_token_id": MASK,
            "block_size": block,
            "draft_vocab_size": size,
        }
        if non_causal is not None:
            config["sliding_window_non_causal"] = non_causal
        if from_anchor is not None:
            config["sample_from_anchor"] = from_anchor
        config |= options or {}
    else:
        part: dict[str, Any] = {"target_layer_ids": ids, "mask_token_id": MASK}
        if causal is not None:
            part["causal"] = causal
        if from_anchor is not None:
            part["sample_from_anchor"] = from_anchor
        if swa:
            part |= {"use_swa": True, "swa_window_size": swa}
        part |= {**(options or {}), **({"draft_vocab_size": draft_vocab} if draft_vocab else {})}
        config = {**inner, "architectures": ["DFlashDraftModel"], "block_size": block, "num_target_layers": LAYERS}
        config |= {"dflash_config": part} if nested else part
    every = bool(causal)
    causal_layers = [every or (speculators and bool(sliding) and not non_causal and i == 0) for i in range(layers)]
    extra: dict[str, Any] = {
        "windows": [swa or (sliding if i == 0 else 0) for i in range(layers)],
        "causal": causal_layers,
        "from_anchor": bool(from_anchor),
    }
    if mask_embedding:
        extra["mask_embedding"] = make.vector(HIDDEN)
    return Draft(config, tensors, {"method": "dflash"}, states, drafts=block_drafts, extra=extra)


def dspark(
    vocab: int,
    kind: str = "vanilla",
    *,
    seed: int = 5,
    speculators: bool = False,
    nested: bool = False,
    from_anchor: bool | None = None,
    confidence: bool = True,
    with_markov: bool = True,
    competing: int | None = None,
    strength: float = 3.0,
    **options: Any,
) -> Draft:
    """A DSpark drafter: DFlash's layers with an embedding and a head of its own, a Markov and a confidence head."""
    fields = {"markov_rank": RANK, "markov_head_type": kind, "enable_confidence_head": confidence}
    fields["confidence_head_with_markov"] = with_markov
    draft = dflash(
        vocab,
        seed=seed,
        speculators=speculators,
        nested=nested,
        from_anchor=from_anchor,
        own=True,
        options=fields,
        **options,
    )
    draft.config["architectures"] = ["DSparkDraftModel" if nested else "Qwen3DSparkModel"]
    if speculators:
        draft.config |= {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"]}
    make, size = Maker(seed + 100), draft.tensors["lm_head.weight"].shape[0]
    t = draft.tensors
    t["markov_head.markov_w1.weight"] = make.matrix(vocab, RANK, RANK**0.5)
    t["markov_head.markov_w2.weight"] = make.matrix(size, RANK, strength)
    if kind == "gated":
        t["markov_head.gate_proj.weight"] = make.matrix(RANK, HIDDEN + RANK)
        t["markov_head.gate_proj.bias"] = make.vector(RANK)
    if kind == "rnn":
        t["markov_head.joint_proj.weight"] = make.matrix(3 * RANK, 2 * RANK + HIDDEN)
        t["markov_head.joint_proj.bias"] = make.vector(3 * RANK)
    if confidence:
        t["confidence_head.proj.weight"] = make.matrix(1, HIDDEN + RANK * with_markov)
        t["confidence_head.proj.bias"] = make.vector(1)
    draft.spec = {"method": "dspark"}
    if competing is not None:
        draft.spec["dspark_draft_topk"] = competing
    draft.drafts = markov_drafts
    default = not speculators
    draft.extra |= {"kind": kind, "from_anchor": default if from_anchor is None else from_anchor}
    draft.extra |= {"competing": competing, "with_markov": with_markov}
    return draft


def rotated(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """The rotary embedding of [T, heads, D] at these positions."""
    size = x.shape[-1]
    angles = positions[:, None] * THETA ** (-torch.arange(0, size, 2) / size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def block_hidden(draft: Draft, target: Tensors, tokens: list[int], hidden: list[torch.Tensor], k: int) -> torch.Tensor:
    """What the drafter makes of a block after `tokens`, after its final norm: [k, H], of the queries that draft."""
    t, anchored = draft.tensors, draft.extra["from_anchor"]
    embedding = t.get("embed_tokens.weight", target["model.embed_tokens.weight"])
    context = rms(torch.cat(hidden, 1) @ t["fc.weight"].T, t["hidden_norm.weight"])
    masks = embedding[MASK] if "mask_embedding" not in draft.extra else draft.extra["mask_embedding"]
    x = torch.stack([embedding[tokens[-1]], *[masks] * (k - anchored)])
    length, size = len(context), len(x)
    positions = torch.arange(length + size)
    for index, (window, causal) in enumerate(zip(draft.extra["windows"], draft.extra["causal"], strict=True)):
        prefix = f"layers.{index}.self_attn"
        normed = rms(x, t[f"layers.{index}.input_layernorm.weight"])
        both = torch.cat((context, normed))
        q = (normed @ t[f"{prefix}.q_proj.weight"].T).view(size, HEADS, HEAD_DIM)
        keys = (both @ t[f"{prefix}.k_proj.weight"].T).view(length + size, KV_HEADS, HEAD_DIM)
        values = (both @ t[f"{prefix}.v_proj.weight"].T).view(length + size, KV_HEADS, HEAD_DIM)
        if f"{prefix}.q_norm.weight" in t:
            q, keys = rms(q, t[f"{prefix}.q_norm.weight"]), rms(keys, t[f"{prefix}.k_norm.weight"])
        q, keys = rotated(q, positions[length:]), rotated(keys, positions)
        distance = positions[length:, None] - positions[None]
        visible = torch.ones_like(distance, dtype=torch.bool)
        if causal:
            visible &= distance >= 0
        if window:
            visible &= distance < window
        keys, values = (part.repeat_interleave(HEADS // KV_HEADS, 1) for part in (keys, values))
        scores = torch.einsum("qhd,khd->hqk", q, keys) * HEAD_DIM**-0.5
        weights = scores.masked_fill(~visible, -torch.inf).softmax(-1)
        x = x + torch.einsum("hqk,khd->qhd", weights, values).flatten(1) @ t[f"{prefix}.o_proj.weight"].T
        y = rms(x, t[f"layers.{index}.post_attention_layernorm.weight"])
        mlp = f"layers.{index}.mlp"
        gate, up = y @ t[f"{mlp}.gate_proj.weight"].T, y @ t[f"{mlp}.up_proj.weight"].T
        x = x + (F.silu(gate) * up) @ t[f"{mlp}.down_proj.weight"].T
    return rms(x, t["norm.weight"])[size - k :]


def block_drafts(
    draft: Draft, target: Tensors, tokens: list[int], hidden: list[torch.Tensor], k: int
) -> list[torch.Tensor]:
    """Logits of k drafts after `tokens`; `hidden`: the target's states of all tokens but the last."""
    head = draft.tensors.get("lm_head.weight", target["lm_head.weight"])
    return list(block_hidden(draft, target, tokens, hidden, k) @ head.T)


def markov_drafts(
    draft: Draft,
    target: Tensors,
    tokens: list[int],
    hidden: list[torch.Tensor],
    k: int,
    confidences: list[float] | None = None,
) -> list[torch.Tensor]:
    """Logits of k drafts, each after the likeliest one before it; appends what the confidence head says."""
    t, kind, found = draft.tensors, draft.extra["kind"], []
    w1, w2 = t["markov_head.markov_w1.weight"], t["markov_head.markov_w2.weight"]
    previous, state = tokens[-1], torch.zeros(RANK)
    for h in block_hidden(draft, target, tokens, hidden, k):
        base, e = t["lm_head.weight"] @ h, w1[previous]
        if kind == "gated":
            gate = t["markov_head.gate_proj.weight"] @ torch.cat((h, e)) + t["markov_head.gate_proj.bias"]
            latent = gate.sigmoid() * e
        elif kind == "rnn":
            z = torch.cat((state, e, h))
            g, c, o = (t["markov_head.joint_proj.weight"] @ z + t["markov_head.joint_proj.bias"]).chunk(3)
            state = g.sigmoid() * state + (1 - g.sigmoid()) * c.tanh()
            latent = o.tanh()
        else:
            latent = e
        logits = base + w2 @ latent
        if draft.extra["competing"] is not None:
            kept = base.topk(draft.extra["competing"]).indices
            logits = torch.full_like(logits, -torch.inf).index_copy(0, kept, logits[kept])
        if confidences is not None:
            features = torch.cat((h, e)) if draft.extra["with_markov"] else h
            score = t["confidence_head.proj.weight"][0] @ features + t["confidence_head.proj.bias"][0]
            confidences.append(float(score.sigmoid()))
        found.append(logits)
        previous = target_id(draft, int(logits.argmax()))
    return found
