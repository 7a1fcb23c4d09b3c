"""The first and the last op of a forward on a real device."""

from __future__ import annotations

import pytest
import torch

from draftgraph.kernels.embed_tokens import embed_tokens, embed_tokens_reference
from draftgraph.kernels.project_logits import project_logits, project_logits_reference

pytestmark = pytest.mark.gpu

DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [1.0, 33.9411])
def test_embed_tokens(dtype, scale):
    table, tokens = torch.randn(300, 1100).to(dtype), torch.randint(0, 300, (16,), dtype=torch.int32)
    scale = float(torch.tensor(scale).to(dtype))
    result = embed_tokens(tokens.cuda(), table.cuda(), scale)
    assert torch.equal(result.cpu(), embed_tokens_reference(tokens, table, scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cap", [0.0, 30.0])
def test_project_logits_writes_into_a_part_of_the_logits(dtype, cap):
    hidden, weight = torch.randn(5, 256).to(dtype), torch.randn(1000, 256).to(dtype)
    logits, expected = torch.full((8, 1000), 9.0, dtype=dtype, device="cuda"), torch.empty(5, 1000, dtype=dtype)
    project_logits_reference(hidden, weight, cap, expected)
    project_logits(hidden.cuda(), weight.cuda(), cap, logits[:5])
    torch.testing.assert_close(logits[:5].cpu(), expected, rtol=DTYPES[dtype], atol=10 * DTYPES[dtype])
    assert (logits[5:] == 9).all()
