"""The floor against counts made by hand."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from draftgraph.profiling import (
    DeviceRates,
    ModelSizes,
    RoundShape,
    StepCost,
    efficiency,
    forward_cost,
    ngram_cost,
    prefill_cost,
    round_costs,
    suffix_cost,
)


def smollm2(**changes):
    sizes = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536}
    heads = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
    return ModelSizes.dense(**{**sizes, **heads, "windows": (0,) * 30, **changes})


SMOLLM2 = smollm2()
RATES = DeviceRates(
    device="made up",
    threads=1,
    torch_version="0",
    copy_bandwidth=10e9,
    read_bandwidth=8e9,
    matmul={"bfloat16": 1e12},
)

# SmolLM2-135M in bfloat16, by hand. One layer's matrices, in elements:
QKV = 552_960  # 576 x (9 + 3 + 3) x 64
OUTPUT = 331_776  # 576 x 576
GATE_UP = 1_769_472  # 576 x 2 x 1536
DOWN = 884_736  # 1536 x 576
MATRICES = 3_538_944  # of one layer
NORMS = 1_152  # 2 x 576, of one layer
BODY = 106_203_456  # 30 x (3,538,944 + 1,152) + 576 for the final norm
HEAD = 28_311_552  # 49152 x 576; tied, so the embedding table is read here
KV = 11_520  # 30 layers x 2 x 3 heads x 64: one token's keys and values


def test_hand_counted_sizes_add_up_to_the_published_parameter_count():
    assert {(layer.matrices, layer.vectors) for layer in SMOLLM2.layers} == {(MATRICES, NORMS)}
    assert QKV + OUTPUT + GATE_UP + DOWN == MATRICES
    assert 30 * (MATRICES + NORMS) + 576 == BODY
    assert SMOLLM2.head == HEAD
    assert SMOLLM2.kv_per_token == KV
    assert BODY + HEAD == 134_515_008


def test_a_round_of_smollm2_in_bfloat16_matches_the_hand_count():
    # One row, anchor and 7 drafts in a verify of width 8, 100 tokens committed before, 5 tokens emitted.
    shape = RoundShape(rows=1, width=8, window=8, context=100, num_drafts=7, emitted=5)
    costs = round_costs(SMOLLM2, shape, ngram_cost(shape, min_n=2, max_n=4))
    assert list(costs) == ["propose", "budget", "verify", "accept", "commit"]

    verify = costs["verify"]
    weights = 212_406_912 + 56_623_104  # 2 bytes each of the body and of the head
    embedding = 9_216  # 8 rows of 576
    keys_and_values_read = 2_304_000  # 100 tokens x 11,520 x 2 bytes
    tokens = 32  # 8 token ids of 4 bytes
    assert verify.bytes_read == weights + embedding + keys_and_values_read + tokens == 271_343_264
    keys_and_values_written = 184_320  # 8 tokens x 11,520 x 2 bytes
    logits = 786_432  # 8 x 49152 x 2 bytes
    packed = 128  # token, position, slot and row of 8 positions
    assert verify.bytes_written == keys_and_values_written + logits + packed == 970_880
    layers = 849_346_560  # 8 positions x 30 layers x 3,538,944
    head = 226_492_416  # 8 positions x 28,311,552
    # 836 pairs of a token and one it sees: 8 x 100, and 1 + 2 + ... + 8 = 36; each takes 64 for the score and
    # 64 for the sum, in 9 heads of 30 layers.
    attention = 28_892_160  # 836 x 128 x 9 x 30
    assert verify.operations == 2 * (layers + head + attention) == 2_209_462_272

    accept = costs["accept"]
    assert accept.bytes_read == 786_432 + 28 + 24  # logits; 7 drafts; temperature, top-k, top-p, min-p and the seed
    assert accept.bytes_written == 8 * 13 + 25  # 3 words and a flag per position; 5 tokens, a count and a flag
    # 5 tokens are entered for n = 2, 3 and 4: 3 heads in and 3 out, 3 links out, the 4-gram in. Then a head, a suffix
    # of 4 and its match in, 7 drafts in and out, and a count out.
    assert costs["propose"].bytes_read == 4 * (5 * (4 + 3) + 1 + 8 + 7)
    assert costs["propose"].bytes_written == 4 * (5 * 6 + 7 + 1)
    assert costs["budget"].bytes == 17 + 16
    assert costs["commit"].bytes == (20 + 16 + 24) + (40 + 9 + 24)
    assert all(costs[phase].operations == 0 for phase in costs if phase != "verify")


def test_plain_decoding_has_no_propose_and_its_weights_are_nearly_all():
    costs = round_costs(SMOLLM2, RoundShape(rows=1, width=4, window=1, context=100))
    assert "propose" not in costs
    total = sum(cost.bytes for cost in costs.values())
    assert 2 * (BODY + HEAD) / total == pytest.approx(0.99, abs=0.01)


def test_logits_are_read_once_more_for_log_probabilities():
    shape = RoundShape(rows=2, width=8, window=3, context=10, emitted=2, logprobs=5)
    logprobs = round_costs(SMOLLM2, shape)["logprobs"]
    assert logprobs.bytes_read == 4 * 49152 * 2
    assert logprobs.bytes_written == 4 * 6 * 8


def test_a_prefill_reads_no_head_and_writes_no_logits():
    cost = prefill_cost(SMOLLM2, width=16, tokens=10, context=20, dtype=torch.bfloat16)
    assert cost.bytes_read == 2 * (BODY + 16 * 576 + 20 * KV)
    assert cost.bytes_written == 2 * 10 * KV
    assert cost.operations == 2 * (16 * 30 * MATRICES + 30 * (10 * 20 + 55) * 2 * 9 * 64)


def test_keys_and_values_may_have_a_type_of_their_own():
    shape = {"width": 8, "rows": 1, "window": 8, "context": 100, "dtype": torch.bfloat16}
    half = forward_cost(SMOLLM2, **shape, kv_dtype=torch.float8_e4m3fn)
    full = forward_cost(SMOLLM2, **shape)
    assert full.bytes_read - half.bytes_read == 100 * KV
    assert full.bytes_written - half.bytes_written == 8 * KV


def test_a_sliding_window_bounds_what_is_read_and_computed():
    sliding, full = smollm2(windows=(0, 16)), smollm2(windows=(0, 0))
    shape = {"width": 4, "rows": 1, "window": 2, "context": 100, "dtype": torch.bfloat16}
    less = forward_cost(full, **shape).bytes_read - forward_cost(sliding, **shape).bytes_read
    assert less == (100 - 15) * 384 * 2
    fewer = forward_cost(full, **shape).operations - forward_cost(sliding, **shape).operations
    assert fewer == 2 * (203 - 32) * 2 * 9 * 64
    short = {**shape, "context": 3}
    assert forward_cost(full, **short) == forward_cost(sliding, **short)


def test_biases_and_extra_norms_are_counted():
    rich = smollm2(windows=(0,), qkv_bias=True, output_bias=True, mlp_bias=True, qk_norm=True, post_norms=True)
    assert rich.layers[0].vectors == NORMS + 960 + 576 + 3072 + 576 + 128 + 1152


def test_the_least_time_is_the_longer_of_bytes_and_operations():
    assert StepCost(bytes_read=4e9, bytes_written=6e9).seconds(RATES) == 1.0
    dtype = torch.bfloat16
    assert StepCost(bytes_read=1e9, operations=5e11, dtype=dtype).seconds(RATES) == 0.5
    assert StepCost(bytes_read=1e10, operations=5e11, dtype=dtype).seconds(RATES) == 1.0
    with pytest.raises(ValueError, match="no matmul rate for float32 was measured; measured: bfloat16"):
        StepCost(operations=1.0).seconds(RATES)


def test_costs_add_up_but_not_across_dtypes():
    bf16 = StepCost(bytes_read=1, operations=2, dtype=torch.bfloat16)
    assert StepCost(bytes_written=3) + bf16 == StepCost(
        bytes_read=1, bytes_written=3, operations=2, dtype=torch.bfloat16
    )
    with pytest.raises(ValueError, match=r"costs in torch.bfloat16 and torch.float32 cannot be added"):
        bf16 + StepCost(operations=1)


def test_efficiency_is_the_share_of_the_least_time():
    found = efficiency(50, 2.0, [(10, StepCost(bytes_read=1e9)), (5, StepCost())], RATES)
    assert (found.tokens_per_second, found.bytes_per_second, found.share_of_limit) == (25.0, 5e9, 0.5)
    assert str(found) == "25.0 tokens/s, 5.0 GB/s, 50% of the limit"
    with pytest.raises(ValueError, match="seconds must be positive, got 0"):
        efficiency(1, 0.0, [], RATES)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 0}, "width must be at least 1, got 0"),
        ({"context": -1}, "context must be at least 0, got -1"),
        ({"window": 5}, "2 windows of 5 tokens do not fit the width 8"),
    ],
)
def test_impossible_rounds_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        RoundShape(**{"rows": 2, "width": 8, "window": 3, "context": 10, **changes})


def test_impossible_sizes_are_refused():
    with pytest.raises(ValueError, match="num_kv_heads must be at least 1, got 0"):
        smollm2(num_kv_heads=0)
    with pytest.raises(ValueError, match="windows needs one value of at least 0 per layer"):
        smollm2(windows=())
    with pytest.raises(ValueError, match="layers needs at least one layer, got none"):
        dataclasses.replace(SMOLLM2, layers=())
    with pytest.raises(ValueError, match="experts_per_token must be 1 to 8, got 9"):
        dataclasses.replace(SMOLLM2.layers[0], num_experts=8, experts_per_token=9)
    with pytest.raises(ValueError, match="cached must be at least 0, got -1"):
        dataclasses.replace(SMOLLM2.layers[0], cached=-1)


def test_suffix_cost_by_hand():
    # 5 tokens enter at 3 depths: 7 words in and 3 out each, and the token itself. Then 8 words per depth, 4 per draft.
    shape = RoundShape(rows=2, width=16, window=5, context=1000, num_drafts=7, emitted=5)
    cost = suffix_cost(shape, depth=3)
    assert cost.bytes_read == 2 * 4 * (5 * (1 + 7 * 3) + 8 * 3 + 4 * 4)
    assert cost.bytes_written == 2 * 4 * (5 * 3 * 3 + 2 * 7 + 2)
