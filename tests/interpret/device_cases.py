"""One test body for the ops of a round on a device: the GPU's tests run it there, this folder's under the interpreter.

An op is run on random rounds and compared with its reference on the CPU, bit by bit in every tensor: eagerly, and
replayed from one graph whose tensors have changed in place. Where there is no graph to capture, the launches are
simply made again.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from acceptance_cases import random_arguments
from adaptive_cases import choosing, estimating, keeping, learning
from budget_cases import budget_arguments
from draft_cases import (
    advance_arguments,
    argmax_arguments,
    block_arguments,
    distribution_arguments,
    merge_arguments,
    tail_arguments,
    unseen_arguments,
)
from op_checks import bits, clone, copied, random_round, set_sampling_parameters

from draftgraph.kernels.registration import CUDA_IMPLEMENTATIONS

STATE_NAMES = {
    "rows": "window_rows",
    "positions": "window_positions",
    "row_failed": "failed",
}
"""Arguments that the decode state has under another name."""


@dataclass(frozen=True)
class DeviceCase:
    """An op and its random arguments."""

    op: str
    make: Callable[[int], list[Any]]
    """From a seed."""
    module: str = ""
    """Of the reference, if not the op's name."""

    def __post_init__(self) -> None:
        importlib.import_module(f"draftgraph.kernels.{self.module or self.op}")

    def reference(self, args: Sequence[Any]) -> None:
        """Runs the specification."""
        module = importlib.import_module(f"draftgraph.kernels.{self.module or self.op}")
        getattr(module, f"{self.op}_reference")(*args)

    def run(self, args: Sequence[Any]) -> None:
        """Runs the op by its kernels; under the interpreter, whose tensors are on the CPU, past the dispatcher."""
        if args[0].device.type == "cpu":
            CUDA_IMPLEMENTATIONS[self.op](*args)
        else:
            getattr(torch.ops.draftgraph, self.op).default(*args)


def from_state(op: str, state: Any, bucket: int, **others: Any) -> list[Any]:
    """The arguments of an op by their names: those of `others`, and else what the decode state has for a bucket."""
    views = {
        "cu_tokens": state.cu_tokens[: bucket + 1],
        "slot_of_row": state.slot_of_row[:bucket],
        "base": state.base[:bucket],
    }
    arguments = getattr(torch.ops.draftgraph, op).default._schema.arguments
    given = views | others
    # An argument with a default keeps it unless it is given.
    names = [argument.name for argument in arguments if argument.default_value is None or argument.name in given]
    return [given[name] if name in given else getattr(state, STATE_NAMES.get(name, name)) for name in names]


def plain(op: str, **sizes: Any) -> Callable[[int], list[Any]]:
    """Random rounds for an op that needs nothing beside the decode state."""
    return lambda seed: from_state(op, *random_round(seed, **sizes))


def plan(seed: int) -> list[Any]:
    widths = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.int32)
    return from_state("plan_window", *random_round(seed, rows=5), widths=widths)


def prefill(seed: int) -> list[Any]:
    state, _ = random_round(seed, context=600)
    window = {
        f"window_{name}": torch.zeros(300, dtype=torch.int32) for name in ("tokens", "positions", "slots", "rows")
    }
    place = {name: torch.zeros(size, dtype=torch.int32) for name, size in (("cu_tokens", 2), ("base", 1))}
    chunk = torch.tensor([seed % 300, 250 + seed % 51], dtype=torch.int32)
    slot = torch.tensor([seed % state.shape.slots], dtype=torch.int32)
    return from_state(
        "pack_prefill", state, 1, prefill_slot=slot, prefill_range=chunk, slot_of_row=slot.clone(), **window, **place
    )


def sampling(vocab: int, dtype: torch.dtype) -> Callable[[int], list[Any]]:
    def make(seed: int) -> list[Any]:
        state, bucket = random_round(seed, rows=2, num_drafts=1, vocab=vocab, dtype=dtype)
        set_sampling_parameters(state, seed)
        # Where the smallest kept number is a zero, either sign is right.
        state.logits.copy_(torch.where(state.logits == 0, 0.0, state.logits))
        return from_state("sample_target", state, bucket, failed=state.token_failed)

    return make


def accepting(vocab: int, dtype: torch.dtype, kind: str) -> Callable[[int], list[Any]]:
    return lambda seed: random_arguments(seed, vocab=vocab, num_drafts=3, dtype=dtype, kind=kind, spoil=bool(seed % 2))


def choosing_drafts(vocab: int, dtype: torch.dtype) -> Callable[[int], list[Any]]:
    """Of logits that are a part of wider rows."""
    return lambda seed: argmax_arguments(seed, vocab=vocab, dtype=dtype, constrained=True, renamed=True, spare=5)


def distributing(vocab: int, dtype: torch.dtype) -> Callable[[int], list[Any]]:
    return lambda seed: distribution_arguments(seed, vocab=vocab, dtype=dtype, spare=5)


def recording(vocab: int, dtype: torch.dtype) -> Callable[[int], list[Any]]:
    def make(seed: int) -> list[Any]:
        state, bucket = random_round(seed, rows=2, num_drafts=1, vocab=vocab, dtype=dtype)
        entries = (*state.tokens.shape, 6)
        return from_state(
            "record_logprobs",
            state,
            bucket,
            logprobs=torch.zeros(entries),
            logprob_tokens=torch.zeros(entries, dtype=torch.int32),
        )

    return make


def synthetic(seed: int) -> list[Any]:
    state, bucket = random_round(seed, num_drafts=4)
    return from_state("accept_synthetic", state, bucket, rates=torch.tensor([1.0, 0.75, 0.5, 0.0]))


def looking_up(seed: int) -> list[Any]:
    state, bucket = random_round(seed, vocab=3, context=80, num_drafts=5)
    slots, context = state.tokens.shape
    tables = {
        "heads": torch.zeros(slots, 3, 32, dtype=torch.int32),
        "links": torch.zeros(slots, 3, context, dtype=torch.int32),
        "indexed": torch.zeros(slots, dtype=torch.int32),
    }
    return from_state("ngram_propose", state, bucket, min_n=2, max_n=4, **tables)


def following(seed: int) -> list[Any]:
    """Suffix decoding with an empty global tree."""
    state, bucket = random_round(seed, rows=5, vocab=3)
    slots, context = state.tokens.shape
    depth = 6

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32)

    tables = {
        "heads": zeros(slots, depth, 8),
        "tree": zeros(slots, 4, depth, context),
        "indexed": zeros(slots),
        "global_tokens": zeros(1),
        "global_heads": zeros(depth, 1),
        "global_tree": zeros(4, depth, 1),
        "budget": torch.tensor([1, 2, 3, 2, 1, 0], dtype=torch.int32),
    }
    return from_state("suffix_propose", state, bucket, min_probability=0.1, **tables)


TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def cases(vocab: int) -> dict[str, DeviceCase]:
    """Every op of a round, those that read logits in each type and with `vocab` of them."""
    found = {
        "plan_window": DeviceCase("plan_window", plan),
        "budget_topk": DeviceCase("budget_topk", lambda seed: budget_arguments(seed, rows=5, num_drafts=7, budget=11)),
        "choose_budget": DeviceCase("choose_budget", lambda seed: choosing(seed, rows=5, num_drafts=7)),
        "keep_drafting": DeviceCase("keep_drafting", lambda seed: keeping(seed - seed % 7, rows=5, num_drafts=7)),
        "estimate_acceptance": DeviceCase("estimate_acceptance", lambda seed: estimating(seed, rows=5, num_drafts=7)),
        "learn_acceptance": DeviceCase("learn_acceptance", lambda seed: learning(seed, rows=5, num_drafts=7)),
        "pack_window": DeviceCase("pack_window", plain("pack_window", rows=5)),
        "pack_prefill": DeviceCase("pack_prefill", prefill, "pack_window"),
        "pack_block": DeviceCase("pack_block", lambda seed: block_arguments(seed, rows=5, size=7, spare=5)),
        "pack_tail": DeviceCase("pack_tail", lambda seed: tail_arguments(seed, rows=5, spare=3)),
        "pack_unseen": DeviceCase("pack_unseen", lambda seed: unseen_arguments(seed, rows=5, masks=3, spare=3)),
        "advance_draft": DeviceCase("advance_draft", lambda seed: advance_arguments(seed, rows=5, spare=3)),
        "advance_draft, mapped": DeviceCase("advance_draft", lambda seed: advance_arguments(seed, rows=5, mapped=True)),
        "merge_drafts": DeviceCase("merge_drafts", lambda seed: merge_arguments(seed, rows=5)),
        "ngram_propose": DeviceCase("ngram_propose", looking_up),
        "suffix_propose": DeviceCase("suffix_propose", following),
        "accept_coupled": DeviceCase("accept_coupled", plain("accept_coupled", vocab=2)),
        "accept_synthetic": DeviceCase("accept_synthetic", synthetic),
        "commit": DeviceCase("commit", plain("commit", rows=5)),
    }
    for name, dtype in TYPES.items():
        found[f"sample_target, {name}"] = DeviceCase("sample_target", sampling(vocab, dtype))
        found[f"draft_argmax, {name}"] = DeviceCase("draft_argmax", choosing_drafts(vocab, dtype))
        found[f"draft_distribution, {name}"] = DeviceCase("draft_distribution", distributing(vocab, dtype))
        found[f"record_logprobs, {name}"] = DeviceCase("record_logprobs", recording(vocab, dtype))
        for rule in ("accept_standard", "accept_block"):
            for kind in ("one-hot", "near"):
                found[f"{rule}, {kind}, {name}"] = DeviceCase(rule, accepting(vocab, dtype, kind))
    return found


def arguments_by_name(case: DeviceCase, args: Sequence[Any]) -> dict[str, Any]:
    """The given arguments by the names that the op's schema gives them; those left to their defaults are absent."""
    schema = getattr(torch.ops.draftgraph, case.op).default._schema
    return {argument.name: arg for argument, arg in zip(schema.arguments[: len(args)], args, strict=True)}


def without_live_rows(case: DeviceCase, args: Sequence[Any]) -> None:
    """Makes every row a padding row on the reserved slot, with an empty window."""
    given = arguments_by_name(case, args)
    for name, value in (("cu_tokens", 0), ("finished", True), ("rows", -1), ("prefill_range", 0), ("positions", 0)):
        if name in given:
            given[name].fill_(value)
    if "slot_of_row" not in given:
        return
    slots = given["slot_of_row"]
    slots.fill_(max(0, *(arg.shape[0] - 1 for name, arg in given.items() if name in BY_SLOT)))
    if "prefill_slot" in given:
        given["prefill_slot"].copy_(slots)


BY_SLOT = ("tokens", "accepted", "seed", "finished", "confidence")
"""Arguments whose first dimension is the slots, the reserved one last; each op has one of them."""


def at_full_length(case: DeviceCase, args: Sequence[Any]) -> None:
    """Makes every row as long as its context and its limit."""
    given = arguments_by_name(case, args)
    context = given["tokens"].shape[1] if "tokens" in given else 48
    for name in ("length", "limit"):
        if name in given:
            given[name].fill_(context)


def moved(args: Sequence[Any], device: str) -> list[Any]:
    return [copied(arg, device) if isinstance(arg, torch.Tensor) else arg for arg in args]


def assert_equal(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if isinstance(a, torch.Tensor):
            assert torch.equal(bits(a.cpu()), bits(b)), f"argument {index}: {a} against {b}"


def check_eager(case: DeviceCase, device: str, seeds: Sequence[int]) -> None:
    """The op on `device` has the reference's effect."""
    for seed in seeds:
        check_effect(case, device, case.make(seed))


def check_effect(case: DeviceCase, device: str, args: Sequence[Any]) -> None:
    """The same for given arguments, which stay as they are."""
    ours, theirs = moved(args, device), clone(args)
    case.run(ours)
    case.reference(theirs)
    assert_equal(ours, theirs)


def check_replay(case: DeviceCase, device: str) -> None:
    """One capture, replayed after its tensors have changed in place, has it too."""
    rounds = alike(case, 3)
    static = moved(rounds[0], device)
    case.run(static)  # makes the workspaces and compiles
    replay = capture(lambda: case.run(static), device)
    for args in (*rounds, rounds[0]):
        theirs = clone(args)
        for target, source in zip(static, args, strict=True):
            if isinstance(target, torch.Tensor):
                target.copy_(source)
        replay()
        case.reference(theirs)
        assert_equal(static, theirs)


def capture(launch: Callable[[], None], device: str) -> Callable[[], None]:
    """The launches as a graph, where the device has graphs."""
    if device == "cpu":
        return launch
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    return graph.replay


def alike(case: DeviceCase, count: int) -> list[list[Any]]:
    """The first random rounds that have one shape."""
    found: dict[Any, list[list[Any]]] = {}
    for seed in range(100):
        args = case.make(seed)
        shapes = tuple(tuple(arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in args)
        group = found.setdefault(shapes, [])
        group.append(args)
        if len(group) == count:
            return group
    raise AssertionError(f"no {count} of 100 random rounds for {case.op} have one shape")
