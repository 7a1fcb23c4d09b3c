"""On CUDA a step runs our ops, compiled regions and little else: no computing by single ops of torch's between them."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch
from fake_engines import CONTEXT, REGIONS, fake_builder, fake_modules
from method_variants import VARYING, variants
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from draftgraph.graphs import verify_widths
from draftgraph.graphs.capture_guard import fake_cuda
from draftgraph.kernels.registration import NAMESPACE
from draftgraph.model_zoo.decoder import DecoderModel
from draftgraph.runtime.rounds import LogprobBuffers
from draftgraph.runtime.speculative_config import METHODS, REJECTION_SAMPLE_METHODS, SpeculativeConfig

pytestmark = pytest.mark.null

PERMITTED = {
    "aten::empty": "memory, which a graph's pool gives without a launch",
    "aten::new_empty": "memory",
    "aten::empty_like": "memory",
    "prim::device": "asks a tensor where it is",
    "aten::copy_": "one copy of contiguous memory, which a graph may hold as a copy node",
    "aten::zero_": "one memset of contiguous memory",
    "aten::cat": "in prefill alone: joins the hidden states of a prompt's chunk, in one launch",
}
"""Ops of torch's outside compiled regions, and why. Views are permitted too, which launch nothing."""
IN_PREFILL_ALONE = {"aten::cat"}
LISTS: tuple[tuple[tuple[str, ...], dict[str, object]], ...] = (
    (("ngram", "dspark"), {"model": "some/draft"}),
    (("suffix", "eagle3"), {"model": "some/draft"}),
    (("suffix", "medusa"), {"model": "some/draft"}),
    (("ngram", "dflash"), {"model": "some/draft"}),
    (("ngram", "suffix", "layerskip", "draft_model"), {"model": "some/draft", "exit_layer": 1}),
)
BUCKET = 2


class Glue(TorchDispatchMode):
    """Notes the ops that neither are ours, nor lie in a compiled region, nor are permitted, and where they stand."""

    def __init__(self, permitted: set[str]) -> None:
        super().__init__()
        self.permitted, self.found = permitted, dict[str, str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        ours = func.namespace == NAMESPACE or REGIONS.running > 0
        permitted = name in self.permitted and moves_memory_alone(name, args)
        if not ours and not permitted and not is_view(result, (args, kwargs)):
            frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
            line = next(f for f in reversed(frames) if not f.filename.endswith(("test_no_glue.py", "capture_guard.py")))
            self.found.setdefault(name, f"{line.filename}:{line.lineno}: {line.line}")
        return result


def moves_memory_alone(name: str, args: tuple[Any, ...]) -> bool:
    """Of a copy or a memset, whether it needs no kernel: of anything else, true."""
    if name == "aten::copy_":
        target, source = args[:2]
        alike = (target.dtype, target.shape, target.device) == (source.dtype, source.shape, source.device)
        return alike and target.is_contiguous() and source.is_contiguous()
    return name != "aten::zero_" or args[0].is_contiguous()


def is_view(result: Any, arguments: Any) -> bool:
    """Whether the op gave another look at what it was given, and so launched nothing."""
    if not isinstance(result, torch.Tensor) or any(result is leaf for leaf in tree_leaves(arguments)):
        return False
    given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)}
    return result.untyped_storage()._cdata in given


def glue_of(spec: SpeculativeConfig, target: str = "dense") -> dict[tuple[str, str], str]:
    """Of every step of an engine's programs, the ops that are glue, and where the first of each stands."""
    found = {}
    with fake_cuda() as device:
        builder, state = fake_builder(spec, device, target)
        depth = spec.num_speculative_tokens or 0
        buffers = LogprobBuffers(
            torch.zeros((5, CONTEXT, 4), device=device), torch.zeros((5, CONTEXT, 4), dtype=torch.int32, device=device)
        )
        programs = (builder.round(BUCKET, verify_widths(BUCKET, depth), buffers, detailed=True), builder.prefill(16))
        for program in programs:
            permitted = set(PERMITTED) - (IN_PREFILL_ALONE if program.name.startswith("round") else set())
            for step in program.steps():
                with torch.inference_mode(), Glue(permitted) as glue:
                    step.fn(state)
                found |= {(step.name, op): where for op, where in glue.found.items()}
    return found


def without_user_classes() -> list[tuple[str | tuple[str, ...], dict[str, object]]]:
    """Every method but those that are the user's own."""
    found = []
    for method, options in variants():
        names = (method,) if isinstance(method, str) else method
        if not any(METHODS[name].user_class for name in names):
            found.append((method, options))
    return found


@pytest.mark.parametrize(("method", "options"), [*without_user_classes(), *LISTS], ids=str)
def test_a_round_has_no_glue(method, options):
    depth = None if method == "none" else 5
    assert glue_of(SpeculativeConfig(method=method, num_speculative_tokens=depth, **options)) == {}


@pytest.mark.parametrize("rule", REJECTION_SAMPLE_METHODS)
def test_a_rule_has_no_glue(rule):
    synthetic = {"synthetic_acceptance_length": 1.5} if rule == "synthetic" else {}
    spec = {"method": "ngram", "num_speculative_tokens": 5, "rejection_sample_method": rule}
    assert glue_of(SpeculativeConfig(**spec, **synthetic)) == {}


@pytest.mark.parametrize("options", VARYING, ids=str)
def test_a_round_of_varying_depth_has_no_glue(options):
    assert glue_of(SpeculativeConfig(**options, num_speculative_tokens=5)) == {}


@pytest.mark.parametrize("target", ["shared caches", "latent", "gated"])
def test_other_targets_have_no_glue(target):
    assert glue_of(SpeculativeConfig(method="eagle", model="some/draft", num_speculative_tokens=5), target) == {}


@pytest.mark.parametrize(("count", "target"), [(2, "dense"), (4, "latent"), (1, "gated")])
def test_prediction_modules_have_no_glue(monkeypatch, count, target):
    """All in one turn, and in several."""
    monkeypatch.setattr("fake_engines.fake_head", lambda spec, model: fake_modules(model, count))
    spec = SpeculativeConfig(method="mtp", num_speculative_tokens=4, draft_sample_method="probabilistic")
    assert glue_of(spec, target) == {}


def test_what_surrounds_a_users_class_has_no_glue():
    """Its own ops are what it likes."""
    spec = SpeculativeConfig(method="custom", speculator="fake_engines:LastToken", num_speculative_tokens=5)
    assert [where for where in glue_of(spec).values() if "fake_engines" not in where] == []


@pytest.mark.parametrize(
    "plant",
    [
        lambda hidden: hidden + 1,
        lambda hidden: hidden.mul_(2),
        lambda hidden: hidden.t().flatten(),
        lambda hidden: hidden.float(),
        lambda hidden: hidden.index_select(0, hidden.new_empty(2, dtype=torch.int64)),
        lambda hidden: hidden.new_empty(hidden.shape, dtype=torch.float32).copy_(hidden),
        lambda hidden: hidden.new_empty(hidden.shape[::-1]).copy_(hidden.t()),
        lambda hidden: hidden.new_empty(hidden.shape).copy_(hidden[:1]),
        lambda hidden: hidden.new_empty(hidden.shape)[:, ::2].zero_(),
    ],
    ids=[
        *("sum", "in place", "layout", "type", "gather"),
        *("converting copy", "transposing copy", "broadcasting copy", "strided memset"),
    ],
)
def test_glue_is_noticed(plant, monkeypatch):
    original = DecoderModel.logits

    def logits(self: DecoderModel, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        plant(hidden)
        return original(self, hidden, out)

    monkeypatch.setattr(DecoderModel, "logits", logits)
    found = glue_of(SpeculativeConfig())
    assert {step for step, _ in found} == {"verify[4]"}
