"""Looking up tokens, scaled as transformers scales them."""

from __future__ import annotations

import pytest
import torch
from op_checks import assert_same_effect, check_capture_safe, check_registration

from draftgraph.kernels.embed_tokens import embed_tokens, embed_tokens_reference

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)


def arguments(dtype: torch.dtype, scale: float) -> list:
    table = torch.randn(50, 24).to(dtype)
    scale = float(torch.tensor(scale).to(dtype))
    return [torch.randint(0, 50, (9,), dtype=torch.int32), table, scale]


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 5.656854, 33.9411])
def test_cpu_equals_reference(dtype, scale):
    args = arguments(dtype, scale)
    assert_same_effect(embed_tokens, embed_tokens_reference, args)
    assert torch.equal(embed_tokens(*args), embed_tokens_reference(*args))
    assert torch.equal(embed_tokens(*args)[3], (args[1][int(args[0][3])].double() * args[2]).to(dtype))


@DTYPES
def test_the_bits_are_those_of_transformers(dtype):
    from transformers.models.gemma3.modeling_gemma3 import Gemma3TextScaledWordEmbedding

    tokens, table, _ = arguments(dtype, 1.0)
    theirs = Gemma3TextScaledWordEmbedding(50, 24, 0, embed_scale=33.9411).to(dtype)
    theirs.weight.data = table
    scale = float(torch.tensor(33.9411).to(dtype))
    with torch.no_grad():
        assert torch.equal(embed_tokens(tokens, table, scale), theirs(tokens.long()))


def test_the_table_is_not_written():
    tokens, table, scale = arguments(torch.float32, 3.0)
    before = table.clone()
    embed_tokens(tokens, table, scale)
    assert torch.equal(table, before)


def test_registration_and_capture():
    for scale in (1.0, 3.0):
        check_registration(embed_tokens, arguments(torch.bfloat16, scale))
        check_capture_safe(embed_tokens_reference, arguments(torch.bfloat16, scale))
