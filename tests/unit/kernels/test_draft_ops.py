"""The ops of a drafting model's step: what they do, by hand, and that the CPU does what the reference says."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from draft_cases import (
    advance_arguments,
    argmax_arguments,
    block_arguments,
    distribution_arguments,
    merge_arguments,
    tail_arguments,
    unseen_arguments,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from op_checks import assert_same_effect, check_capture_safe, check_registration, random_round

from draftgraph.kernels.advance_draft import advance_draft, advance_draft_reference
from draftgraph.kernels.draft_argmax import draft_argmax, draft_argmax_reference
from draftgraph.kernels.draft_distribution import draft_distribution, draft_distribution_reference
from draftgraph.kernels.merge_drafts import merge_drafts, merge_drafts_reference
from draftgraph.kernels.pack_block import pack_block, pack_block_reference
from draftgraph.kernels.pack_tail import pack_tail, pack_tail_reference
from draftgraph.kernels.pack_unseen import pack_unseen, pack_unseen_reference
from draftgraph.kernels.philox import DRAFT, TARGET
from draftgraph.kernels.sample_target import sample_target, sample_target_reference
from draftgraph.kernels.vocabulary import constrain_draft_logits, map_draft_to_target_ids

SEEDS = st.integers(0, 10**6)
CASES = {
    "pack_tail": (pack_tail, pack_tail_reference, tail_arguments),
    "pack_block": (pack_block, pack_block_reference, block_arguments),
    "pack_unseen": (pack_unseen, pack_unseen_reference, unseen_arguments),
    "draft_argmax": (draft_argmax, draft_argmax_reference, argmax_arguments),
    "draft_distribution": (draft_distribution, draft_distribution_reference, distribution_arguments),
    "advance_draft": (advance_draft, advance_draft_reference, advance_arguments),
    "merge_drafts": (merge_drafts, merge_drafts_reference, merge_arguments),
}


@pytest.mark.parametrize("name", CASES)
def test_references_are_capture_safe_and_ops_are_registered(name):
    op, reference, arguments = CASES[name]
    check_capture_safe(reference, arguments(3))
    check_registration(op, arguments(4))


@given(seed=SEEDS, rows=st.integers(1, 5), tail=st.integers(1, 4), mapped=st.booleans(), spare=st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_pack_tail_equals_its_reference(seed, rows, tail, mapped, spare):
    arguments = tail_arguments(seed, rows=rows, tail=tail, mapped=mapped, spare=spare)
    assert_same_effect(pack_tail, pack_tail_reference, arguments)


@pytest.mark.parametrize("op", [pack_tail, pack_tail_reference])
def test_pack_tail_by_hand(op):
    state, _ = random_round(0, rows=3)
    state.finished[:3] = torch.tensor([False, True, False])
    state.length[:3] = torch.tensor([5, 9, 1])
    state.tokens[:3, :6] = torch.tensor([[10, 11, 12, 13, 14, 15], [20] * 6, [30] * 6])
    slots = torch.tensor([2, 1, 0, state.reserved_slot], dtype=torch.int32)
    out = [torch.full((size,), 99, dtype=torch.int32) for size in (8, 8, 8, 8, 5, 4, 4)]
    op(state.tokens, state.length, state.finished, slots, torch.arange(40, dtype=torch.int32) * 2, 2, *out)
    reserved = state.reserved_slot
    # A row of one token, a finished one, the last two of five tokens, and padding.
    assert out[0].tolist() == [60, 26, 28, 0, 0, 0, 0, 0]
    assert out[1].tolist() == [0, 3, 4, 0, 0, 0, 0, 0]
    assert out[2].tolist() == [2, 0, 0, *[reserved] * 5]
    assert out[3].tolist() == [0, 2, 2, -1, -1, -1, -1, -1]
    assert out[4].tolist() == [0, 1, 1, 3, 3]
    assert out[5].tolist()[0::2] == [0, 3]
    assert out[6].tolist() == [0, 0, 2, 0]


@given(seed=SEEDS, rows=st.integers(1, 5), size=st.integers(1, 5), spare=st.integers(0, 3))
@settings(max_examples=50, deadline=None)
def test_pack_block_equals_its_reference(seed, rows, size, spare):
    assert_same_effect(pack_block, pack_block_reference, block_arguments(seed, rows=rows, size=size, spare=spare))


@pytest.mark.parametrize("op", [pack_block, pack_block_reference])
def test_pack_block_by_hand(op):
    state, _ = random_round(0, rows=3)
    state.finished[:3] = torch.tensor([False, True, False])
    state.length[:3] = torch.tensor([5, 9, 1])
    state.tokens[:3, :6] = torch.tensor([[10, 11, 12, 13, 14, 15], [20] * 6, [30] * 6])
    slots = torch.tensor([2, 1, 0], dtype=torch.int32)
    out = [torch.full((size,), 99, dtype=torch.int32) for size in (8, 8, 8, 8, 3, 3)]
    op(state.tokens, state.length, state.finished, slots, 2, 8, *out)
    reserved = state.reserved_slot
    # A row of one token, a finished one, the last of five tokens, and padding.
    assert out[0].tolist() == [30, 8, 0, 8, 14, 8, 0, 0]
    assert out[1].tolist() == [0, 1, 0, 1, 4, 5, 0, 0]
    assert out[2].tolist() == [2, 2, reserved, reserved, 0, 0, reserved, reserved]
    assert out[3].tolist() == [0, 0, 1, 1, 2, 2, -1, -1]
    assert out[4].tolist() == [0, 0, 4]
    assert out[5].tolist() == [2, reserved, 0]


@given(
    seed=SEEDS,
    rows=st.integers(1, 5),
    masks=st.integers(0, 4),
    spare=st.integers(0, 3),
    ring=st.sampled_from([0, 8]),
)
@settings(max_examples=100, deadline=None)
def test_pack_unseen_equals_its_reference(seed, rows, masks, spare, ring):
    arguments = unseen_arguments(seed, rows=rows, masks=masks, spare=spare, ring=ring)
    assert_same_effect(pack_unseen, pack_unseen_reference, arguments)


@pytest.mark.parametrize("op", [pack_unseen, pack_unseen_reference])
def test_pack_unseen_by_hand(op):
    state, _ = random_round(0, rows=3)
    reserved = state.reserved_slot
    state.finished[:4] = torch.tensor([False, True, False, False])
    state.length[:4] = torch.tensor([6, 9, 1, 4])
    state.limit[:4] = torch.tensor([20, 20, 20, 7])  # room for one draft more than the next, in the last row
    state.tokens[0, :6] = torch.tensor([10, 11, 12, 13, 14, 15])
    state.tokens[3, :4] = torch.tensor([30, 31, 32, 33])
    seen, start = state.length * 0, state.length * 0
    seen[:4], start[:4] = torch.tensor([3, 1, 0, 2]), torch.tensor([40, 41, 42, 50])
    slots = torch.tensor([0, 1, 2, 3, reserved], dtype=torch.int32)
    window = [torch.full((9,), 99, dtype=torch.int32) for _ in range(4)]
    out = [torch.full((size,), 99, dtype=torch.int32) for size in (6, 5, 5, 9, 16)]
    op(state.tokens, state.length, state.limit, state.finished, slots, seen, start, 2, 8, 77, 0, *window, *out)
    # Two pairs and two masks; a finished row; a row without a pair; one pair, and a mask for which there is room.
    assert window[0].tolist() == [14, 15, 8, 8, 33, 8, 0, 0, 0]
    assert window[1].tolist() == [3, 4, 5, 6, 2, 3, 0, 0, 0]
    assert window[2].tolist() == [0, 0, 0, 0, 3, 3, reserved, reserved, reserved]
    assert window[3].tolist() == [0, 0, 0, 0, 3, 3, -1, -1, -1]
    ends, base, owners, states, queries = (x.tolist() for x in out)
    assert ends == [0, 4, 4, 4, 6, 6]
    assert base == [3, 0, 0, 2, 0]
    assert owners == [0, reserved, reserved, 3, reserved]
    assert states == [40, 41, 77, 77, 50, 77, 77, 77, 77]
    assert queries == [1, 0, 0, 4, 0, 2, 0, 0, 5, 0, 3, 0, 0, 0, 0, 0]


@given(
    seed=SEEDS,
    rows=st.integers(1, 5),
    vocab=st.sampled_from([1, 2, 33, 1025]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    constrained=st.booleans(),
    coarse=st.booleans(),
    renamed=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_draft_argmax_equals_its_reference(seed, rows, vocab, dtype, constrained, coarse, renamed):
    options = {"constrained": constrained, "coarse": coarse, "renamed": renamed}
    arguments = argmax_arguments(seed, rows=rows, vocab=vocab, dtype=dtype, **options)
    assert_same_effect(draft_argmax, draft_argmax_reference, arguments)


@pytest.mark.parametrize("constrained", [False, True])
def test_draft_argmax_is_the_softmax_of_what_is_allowed(constrained):
    arguments = argmax_arguments(5, rows=2, vocab=300, constrained=constrained)
    logits, allowed, _, chosen, confidence, failed = arguments
    draft_argmax(*arguments)
    expected = logits if allowed is None else constrain_draft_logits(logits, allowed)
    largest = expected.softmax(1).max(1)
    assert chosen.tolist() == largest.indices.tolist()
    assert confidence.tolist() == pytest.approx(largest.values.tolist(), rel=1e-5)
    assert not failed.any()
    if allowed is not None:
        assert bool(allowed[chosen.long()].all())
        assert logits.argmax(1).tolist() != chosen.tolist(), "the constraint must have mattered"


def test_draft_argmax_where_nothing_is_allowed():
    logits, _, *out = argmax_arguments(1, rows=2)
    draft_argmax(logits, torch.zeros(40, dtype=torch.bool), *out)
    assert out[3].tolist() == [True, True]
    assert out[1].tolist() == [0, 0]


def test_draft_argmax_names_tokens_by_their_ids():
    plain, renamed = argmax_arguments(5, rows=2), argmax_arguments(5, rows=2, renamed=True)
    for arguments in (plain, renamed):
        draft_argmax(*arguments)
    ids, chosen = renamed[2], renamed[3]
    assert chosen.tolist() == ids[plain[3].long()].tolist()
    assert renamed[4].tolist() == plain[4].tolist()


@given(
    seed=SEEDS,
    rows=st.integers(1, 4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    step=st.integers(0, 2),
)
@settings(max_examples=60, deadline=None)
def test_draft_distribution_equals_its_reference(seed, rows, dtype, step):
    arguments = distribution_arguments(seed, rows=rows, dtype=dtype, step=step)
    assert_same_effect(draft_distribution, draft_distribution_reference, arguments)


def test_draft_distribution_is_what_was_sampled_from():
    arguments = distribution_arguments(2, rows=4)
    logits, sampled, _, _, temperature, finished, slots, step, draft_probs = arguments
    finished[:-1] = False
    temperature[:] = 0.7
    state, bucket = random_round(2, rows=4, vocab=40)
    row = torch.arange(logits.shape[0], dtype=torch.int32) % bucket
    ends = torch.arange(bucket + 1, dtype=torch.int32)
    top_k = torch.full_like(state.top_k, 5)
    ones, zeros = torch.ones_like(temperature), torch.zeros_like(temperature)
    sample_target(
        logits, row, row, ends, slots, temperature, top_k, ones, zeros, state.seed, sampled,
        arguments[2], arguments[3], torch.zeros(logits.shape[0], dtype=torch.bool),
    )  # fmt: skip
    draft_distribution(*arguments)
    for index, slot in enumerate(slots[:4].tolist()):
        z = logits[index] / 0.7
        expected = z.masked_fill(z < z.topk(5).values[-1], -torch.inf).softmax(0)
        torch.testing.assert_close(draft_probs[slot, step], expected)
        assert (draft_probs[slot, step] > 0).sum() == 5
    assert (draft_probs[:, 0] == 7.0).all(), "only the step's own distribution is written"


@given(
    seed=SEEDS,
    rows=st.integers(1, 5),
    step=st.integers(0, 2),
    shift=st.sampled_from([-9, -2, -1, 0, 1, 2]),
    margin=st.integers(0, 2),
    mapped=st.booleans(),
    spare=st.integers(0, 3),
)
@settings(max_examples=100, deadline=None)
def test_advance_draft_equals_its_reference(seed, rows, step, shift, margin, mapped, spare):
    arguments = advance_arguments(seed, rows=rows, step=step, shift=shift, margin=margin, mapped=mapped, spare=spare)
    assert_same_effect(advance_draft, advance_draft_reference, arguments)


@pytest.mark.parametrize("op", [advance_draft, advance_draft_reference])
def test_advance_draft_by_hand(op):
    state, _ = random_round(0, rows=4, num_drafts=3)
    assert state.shape.slots >= 5
    state = dataclasses.replace(state, slot_of_row=torch.tensor([0, 1, 2, 3, 4, state.reserved_slot]).int())
    state.finished[:5] = torch.tensor([False, False, False, True, False])
    state.length[:5] = torch.tensor([5, 6, 7, 8, 9])
    state.limit[:5] = torch.tensor([20, 8, 9, 20, 20])  # room for many, 1, 1, many, many
    state.draft_tokens.fill_(50)
    chosen = torch.tensor([3, 4, 5, 6, 7, 8, 0, 0], dtype=torch.int32)
    sure = torch.linspace(0.1, 0.8, 8)
    failed = torch.tensor([False, False, True, False, False, False, False, False])
    target_ids = torch.tensor([0, 1, 2, 13, 14, 15, 16, -1, 18], dtype=torch.int32)
    window = [torch.full((8,), 99, dtype=torch.int32) for _ in range(4)]
    base, owners = torch.full((6,), 99, dtype=torch.int32), torch.full((6,), 99, dtype=torch.int32)
    op(
        chosen, sure, failed, state.length, state.limit, state.finished, state.slot_of_row, target_ids, 0, -1, 0,
        state.draft_tokens, state.confidence, state.draft_count, *window, base, owners,
    )  # fmt: skip
    reserved = state.reserved_slot
    # A draft; the last one; logits that failed; a finished row; a token that the target does not have; padding.
    assert state.draft_tokens[:5, 0].tolist() == [13, 14, -1, -1, -1]
    assert (state.draft_tokens[:, 1:] == 50).all()
    assert state.confidence[:5, 0].tolist() == pytest.approx([0.1, 0.2, 0.0, 0.0, 0.0])
    assert state.draft_count[:5].tolist() == [1, 1, 1, 0, 1]
    assert window[0].tolist() == [3, 0, 0, 0, 7, 0, 0, 0]
    assert window[1].tolist() == [4, 0, 0, 0, 8, 0, 0, 0]
    assert window[2].tolist() == [0, *[reserved] * 3, 4, *[reserved] * 3]
    assert window[3].tolist() == [0, 1, 2, 3, 4, 5, -1, -1]
    assert base.tolist() == window[1][:6].tolist()
    assert owners.tolist() == window[2][:6].tolist()


def test_the_two_vocabulary_steps():
    logits = torch.tensor([[1.0, 3.0, 2.0]])
    allowed = torch.tensor([True, False, True])
    assert constrain_draft_logits(logits, allowed).tolist() == [[1.0, -torch.inf, 2.0]]
    ids = torch.tensor([7, -1, 9], dtype=torch.int32)
    assert map_draft_to_target_ids(torch.tensor([[2, 0, 1]], dtype=torch.int32), ids).tolist() == [[9, 7, -1]]


@pytest.mark.parametrize("op", [sample_target, sample_target_reference])
def test_streams_of_sampling_are_independent(op):
    state, bucket = random_round(0, rows=1, vocab=500)
    width, slots = 400, state.slot_of_row[:bucket]
    state.temperature.fill_(1.0)
    state.top_k.zero_()
    row, position = torch.zeros(width, dtype=torch.int32), torch.arange(width, dtype=torch.int32)
    ends = torch.full((bucket + 1,), width, dtype=torch.int32)
    ends[0] = 0
    samples = []
    for stream in ((), (TARGET,), (DRAFT,)):
        sampled = torch.zeros(width, dtype=torch.int32)
        op(
            torch.zeros(width, 500), row, position, ends, slots, state.temperature, state.top_k, state.top_p,
            state.min_p, state.seed, sampled, torch.zeros(width), torch.zeros(width), row.bool(), *stream,
        )  # fmt: skip
        samples.append(sampled)
    assert torch.equal(samples[0], samples[1])
    assert (samples[0] == samples[2]).sum() < 8  # one in 500 by chance


@given(seed=SEEDS, rows=st.integers(1, 5), members=st.integers(1, 4), num_drafts=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_merge_drafts_equals_its_reference(seed, rows, members, num_drafts):
    arguments = merge_arguments(seed, rows=rows, members=members, num_drafts=num_drafts)
    assert_same_effect(merge_drafts, merge_drafts_reference, arguments)


@pytest.mark.parametrize("op", [merge_drafts, merge_drafts_reference])
def test_merge_drafts_by_hand(op):
    tokens = torch.tensor(
        [[[1, 2], [3, 4], [-1, 5], [6, 7], [9, 9]], [[11, 12], [13, 14], [15, 16], [17, 18], [9, 9]]],
        dtype=torch.int32,
    )
    count = torch.tensor([[2, 0, 2, 1, 2], [1, 1, 2, 2, 2]], dtype=torch.int32)
    finished = torch.tensor([False, False, False, True, False])
    drafts, counts = torch.full((5, 2), 99, dtype=torch.int32), torch.full((5,), 99, dtype=torch.int32)
    confidence = torch.full((5, 2), 99.0)
    slots = torch.tensor([3, 0, 2, 1], dtype=torch.int32)
    op(tokens, count, tokens.float() / 10, finished, slots, drafts, counts, confidence)
    # The first has drafts; has none; has no proposal in front; the row is finished; and a slot that takes no part.
    assert drafts.tolist() == [[1, 2], [13, 14], [15, 16], [-1, -1], [99, 99]]
    assert counts.tolist() == [2, 1, 2, 0, 99]
    assert torch.equal(confidence[:3], drafts[:3].float() / 10)
    assert confidence[3:].tolist() == [[0.0, 0.0], [99.0, 99.0]]
