"""Prediction modules that know the toy language, in the published layouts, as checkpoints of their own."""

from __future__ import annotations

import torch
import toy_language as toy
from draft_heads import Draft
from mtp_heads import STYLES, named


def modules(vocab: int, style: str, count: int = 1) -> Draft:
    """The projection takes the embedding, the layer adds nothing, and the target's head maps codes to successors.

    In the cycle of length j + 1 they are wrong about one token, as the heads of `toy_language` are.
    """
    form, size = STYLES[style], toy.HIDDEN
    neutral = torch.zeros(size) if form.unit_offset else torch.ones(size)
    sides = [torch.eye(size), torch.zeros(size, size)]
    projection = torch.cat(sides[::-1] if form.hidden_first else sides, 1)
    table = toy._embedding(vocab, wrong=True)
    tensors: dict[str, torch.Tensor] = {}
    for index in range(count):
        prefix = named(form.layer, index)
        tensors |= toy._idle_layer(prefix.removesuffix("."), size)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = neutral.clone()
        for place, pattern in enumerate(form.parts):
            if pattern is not None:
                tensors[f"{named(pattern, index)}.weight"] = projection.clone() if place == 2 else neutral.clone()
        if style == "deepseek":
            tensors[f"{prefix}embed_tokens.weight"] = table.clone()
    if style != "deepseek":
        tensors["model.embed_tokens.weight"] = table
    config = {**toy._config(vocab), "num_nextn_predict_layers": count}
    return Draft(config, tensors, {"method": "mtp"})
