"""Attention over windows: against a loop over single queries, against the reference, and bit for bit."""

import math

import pytest
import torch

from draftgraph.kernels.window_attention import window_attention, window_attention_reference

CONTEXT, SLOTS = 704, 4


def _int(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _case(counts, bases, slots, *, heads=(6, 2), dims=(16, 16), padding=0, tree=False, dtype=torch.float32, seed=0):
    """Inputs of a pack of rows, everything random."""
    generator = torch.Generator().manual_seed(seed)
    cu_tokens = [0]
    positions, ancestors = [], []
    for count, base in zip(counts, bases, strict=True):
        cu_tokens.append(cu_tokens[-1] + count)
        depths, masks = [], []
        for j in range(count):
            # In a tree, token j hangs under token (j - 1) // 2; in a chain under token j - 1.
            parent = (j - 1) // 2 if tree else j - 1
            depths.append(depths[parent] + 1 if j else 0)
            masks.append((masks[parent] if j else 0) | 1 << j)
        positions += [base + depth for depth in depths]
        ancestors += [mask - (1 << 64) if mask >> 63 else mask for mask in masks]
    width = cu_tokens[-1] + padding
    positions += [0] * padding
    ancestors += [0] * padding

    def random(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    return {
        "query": random(width, heads[0], dims[0]),
        "key_cache": random(SLOTS, heads[1], CONTEXT, dims[0]),
        "value_cache": random(SLOTS, heads[1], CONTEXT, dims[1]),
        "positions": _int(positions),
        "cu_tokens": _int(cu_tokens),
        "base": _int(bases),
        "slot_of_row": _int(slots),
        "ancestors": torch.tensor(ancestors) if tree else None,
        "scale": 1 / math.sqrt(dims[0]),
    }


def _by_hand(case, sliding_window=0, soft_cap=0.0):
    """One query at a time, its keys picked one by one."""
    query, cu_tokens = case["query"].double(), case["cu_tokens"].tolist()
    result = torch.zeros(*query.shape[:2], case["value_cache"].shape[3], dtype=torch.float64)
    group = query.shape[1] // case["key_cache"].shape[1]
    for row, base in enumerate(case["base"].tolist()):
        first, count = cu_tokens[row], cu_tokens[row + 1] - cu_tokens[row]
        slot = int(case["slot_of_row"][row])
        for j in range(count):
            mask = int(case["ancestors"][first + j]) if case["ancestors"] is not None else (1 << (j + 1)) - 1
            window = [k for k in range(count) if mask >> k & 1]
            keys = list(range(base)) + [base + k for k in window]
            at = list(range(base)) + [int(case["positions"][first + k]) for k in window]
            now = int(case["positions"][first + j])
            seen = [k for k, p in zip(keys, at, strict=True) if not sliding_window or p > now - sliding_window]
            for head in range(query.shape[1]):
                key = case["key_cache"][slot, head // group, seen].double()
                value = case["value_cache"][slot, head // group, seen].double()
                scores = key @ query[first + j, head] * case["scale"]
                if soft_cap:
                    scores = soft_cap * torch.tanh(scores / soft_cap)
                result[first + j, head] = torch.softmax(scores, dim=0) @ value
    return result


PACKS = {
    "prefill": {"counts": [100], "bases": [0], "slots": [1], "padding": 28},
    "chunk": {"counts": [40], "bases": [50], "slots": [1]},
    "decode": {"counts": [1], "bases": [63], "slots": [0]},
    "rows": {"counts": [3, 0, 1, 5, 0], "bases": [60, 0, 300, 0, 9], "slots": [2, 3, 0, 1, 3], "padding": 7},
    "empty": {"counts": [0, 0], "bases": [0, 0], "slots": [3, 3], "padding": 4},
}


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
@pytest.mark.parametrize("sliding_window", [0, 1, 20, 100])
# A window of a tree has at most 64 tokens.
@pytest.mark.parametrize(
    ("pack", "tree"),
    [(pack, tree) for pack in PACKS for tree in (False, True) if not (tree and pack == "prefill")],
)
def test_equals_single_queries(pack, tree, sliding_window, soft_cap) -> None:
    case = _case(**PACKS[pack], tree=tree)
    expected = _by_hand(case, sliding_window, soft_cap)
    for function in (window_attention, window_attention_reference):
        result = function(**case, sliding_window=sliding_window, soft_cap=soft_cap)
        torch.testing.assert_close(result.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [(4, 4), (7, 1), (8, 2)])
@pytest.mark.parametrize("dims", [(16, 16), (24, 16)])
def test_head_groups_and_value_dimensions(heads, dims) -> None:
    case = _case([2, 5], [70, 126], [1, 2], heads=heads, dims=dims)
    result = window_attention(**case)
    torch.testing.assert_close(result.double(), _by_hand(case), rtol=1e-5, atol=1e-5)


def test_all_64_bits_of_a_window() -> None:
    case = _case([64], [10], [1], tree=True)
    # Everyone sees everyone, as in a bidirectional draft block.
    case["ancestors"] = torch.full((64,), -1)
    for function in (window_attention, window_attention_reference):
        result = function(**case, sliding_window=0, soft_cap=0.0)
        torch.testing.assert_close(result.double(), _by_hand(case), rtol=1e-5, atol=1e-5)


def test_bfloat16_is_close() -> None:
    case = _case([3, 2], [60, 300], [1, 2], dtype=torch.bfloat16)
    result = window_attention(**case)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.double(), _by_hand(case), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("sliding_window", [0, 100])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_does_not_depend_on_the_pack(dtype, tree, sliding_window) -> None:
    alone = _case([5], [62], [1], tree=tree, dtype=dtype)
    expected = window_attention(**alone, sliding_window=sliding_window)
    for index in range(3):
        counts, bases, slots = [3, 9], [200, 7], [0, 2]
        counts.insert(index, 5)
        bases.insert(index, 62)
        slots.insert(index, 1)
        pack = _case(counts, bases, slots, tree=tree, dtype=dtype, padding=index * 5, seed=9)
        first = int(pack["cu_tokens"][index])
        pack["query"][first : first + 5] = alone["query"]
        pack["key_cache"][1], pack["value_cache"][1] = alone["key_cache"][1], alone["value_cache"][1]
        result = window_attention(**pack, sliding_window=sliding_window)
        assert torch.equal(result[first : first + 5], expected)


@pytest.mark.parametrize("heads", [(9, 3, 64), (8, 2, 128), (4, 1, 256), (14, 2, 64)])
@pytest.mark.parametrize("sliding_window", [0, 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_token_does_not_depend_on_the_length_of_its_window(dtype, sliding_window, heads) -> None:
    num_heads, kv_heads, dim = heads
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(CONTEXT, num_heads, dim, generator=generator).to(dtype)
    keys = torch.randn(2, kv_heads, CONTEXT, dim, generator=generator).to(dtype)
    values = torch.randn(2, kv_heads, CONTEXT, dim, generator=generator).to(dtype)
    for place in (5, 62, 63, 64, 130, 255, 300, 511, 515, 620):
        expected = None
        for count in (1, 2, 3, 4, 5, 8, 16, 64):
            for j in {0, count // 2, count - 1}:
                base = place - j
                if base < 0:
                    continue
                result = window_attention(
                    query[base : base + count],
                    keys,
                    values,
                    torch.arange(base, base + count, dtype=torch.int32),
                    _int([0, count]),
                    _int([base]),
                    _int([0]),
                    None,
                    dim**-0.5,
                    sliding_window,
                )[j]
                expected = result if expected is None else expected
                assert torch.equal(result, expected), (place, count, j)


def test_values_that_no_token_sees_do_not_matter() -> None:
    case = _case([3], [10], [1])
    expected = window_attention(**case)
    case["key_cache"][:, :, 13:] = 1e4
    case["value_cache"][:, :, 13:] = -1e4
    assert torch.equal(window_attention(**case), expected)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("count", [4, 16])
def test_the_result_is_dense_as_compiled_code_expects(heads, padding, count):
    case = _case([count], [5], [1], heads=heads, padding=padding)
    assert window_attention(**case).is_contiguous()
