"""The fused step from the projection to attention's inputs, against transformers' own functions."""

import pytest
import torch
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.glm.modeling_glm import apply_rotary_pos_emb as interleaved_rope
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as half_split_rope
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from draftgraph.kernels.rope_and_cache import rope_and_cache

HEADS, KV_HEADS, DIM, CONTEXT, SLOTS = 6, 2, 16, 128, 4
EPS = 1e-6


def _int(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _tables(rotary: int) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = 1.0 / 10_000 ** (torch.arange(0, rotary, 2).float() / rotary)
    angles = torch.arange(CONTEXT).float()[:, None] * frequency
    return angles.cos(), angles.sin()


# Rows of 3, 0 and 2 tokens, then two padding positions.
CU_TOKENS, BASE, SLOT_OF_ROW = _int(0, 3, 3, 5), _int(10, 0, 62), _int(2, 3, 0)
ROWS, PLACES = _int(0, 0, 0, 2, 2, -1, -1), [10, 11, 12, 62, 63]
TOKEN_SLOTS = _int(2, 2, 2, 0, 0, 3, 3)
POSITIONS = _int(10, 11, 12, 62, 63, 0, 0)


def _run(qkv, q_norm, k_norm, rotary, unit_offset, interleaved, compiled=False):
    cos, sin = _tables(rotary)
    key_cache = torch.full((SLOTS, KV_HEADS, CONTEXT, DIM), 7.0, dtype=qkv.dtype)
    value_cache = torch.full((SLOTS, KV_HEADS, CONTEXT, DIM), 7.0, dtype=qkv.dtype)
    function = torch.compile(rope_and_cache, fullgraph=True, dynamic=False) if compiled else rope_and_cache
    query = function(
        qkv, q_norm, k_norm, cos, sin, POSITIONS, TOKEN_SLOTS, ROWS, CU_TOKENS, BASE,
        key_cache, value_cache, HEADS, EPS, unit_offset, interleaved,
    )  # fmt: skip
    return query, key_cache, value_cache


def _split(qkv):
    query, key, value = qkv.split([HEADS * DIM, KV_HEADS * DIM, KV_HEADS * DIM], dim=-1)
    return query.view(-1, HEADS, DIM), key.view(-1, KV_HEADS, DIM), value.view(-1, KV_HEADS, DIM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("norm", "rotary", "interleaved", "compiled"),
    [
        (norm, rotary, pairs, False)
        for norm in (None, "qwen3", "gemma3")
        for rotary in (16, 8)
        for pairs in (False, True)
    ]
    + [("qwen3", 16, pairs, True) for pairs in (False, True)],
)
def test_equals_transformers(dtype, norm, rotary, interleaved, compiled) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(7, (HEADS + 2 * KV_HEADS) * DIM).to(dtype)
    q_norm = k_norm = None
    query, key, value = _split(qkv)
    if norm is not None:
        module = {"qwen3": Qwen3RMSNorm, "gemma3": Gemma3RMSNorm}[norm](DIM, EPS)
        q_norm, k_norm = torch.randn(DIM).to(dtype), torch.randn(DIM).to(dtype)
        module.weight.data = q_norm
        query = module(query)
        module.weight.data = k_norm
        key = module(key)

    cos, sin = (table[POSITIONS] for table in _tables(rotary))
    cos, sin = (torch.cat((t, t), dim=-1)[None].to(dtype) for t in (cos, sin))
    query, key = query.transpose(0, 1)[None], key.transpose(0, 1)[None]
    rope = interleaved_rope if interleaved else half_split_rope
    turned_query, turned_key = rope(query[..., :rotary], key[..., :rotary], cos, sin)
    query = torch.cat((turned_query, query[..., rotary:]), dim=-1)[0].transpose(0, 1)
    key = torch.cat((turned_key, key[..., rotary:]), dim=-1)[0].transpose(0, 1)

    result, key_cache, value_cache = _run(qkv, q_norm, k_norm, rotary, norm == "gemma3", interleaved, compiled)
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 4e-2}
    torch.testing.assert_close(result[:5], query[:5], **close)
    for token, place in enumerate(PLACES):
        slot = int(TOKEN_SLOTS[token])
        torch.testing.assert_close(key_cache[slot, :, place], key[token], **close)
        assert torch.equal(value_cache[slot, :, place], value[token])


@pytest.mark.parametrize("compiled", [False, True])
def test_writes_nowhere_else(compiled) -> None:
    torch.manual_seed(0)
    qkv = torch.randn(7, (HEADS + 2 * KV_HEADS) * DIM)
    _, key_cache, value_cache = _run(qkv, None, None, DIM, False, False, compiled)
    for cache in (key_cache, value_cache):
        changed = (cache != 7.0).any(-1).any(1)
        assert sorted(changed[2].nonzero().flatten().tolist()) == [10, 11, 12]
        assert sorted(changed[0].nonzero().flatten().tolist()) == [62, 63]
        assert not changed[1].any()


def test_padding_with_a_wrong_slot_still_goes_to_the_reserved_one() -> None:
    torch.manual_seed(0)
    cos, sin = _tables(DIM)
    key_cache = torch.zeros(SLOTS, KV_HEADS, CONTEXT, DIM)
    value_cache = torch.zeros_like(key_cache)
    rope_and_cache(
        torch.randn(2, (HEADS + 2 * KV_HEADS) * DIM), None, None, cos, sin, _int(0, 0), _int(1, 1),
        _int(-1, -1), _int(0, 0), _int(5), key_cache, value_cache, HEADS, EPS, False, False,
    )  # fmt: skip
    assert not key_cache[:-1].any()
    assert not value_cache[:-1].any()
    assert key_cache[-1].any()
