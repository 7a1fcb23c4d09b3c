"""Every step of every program of an engine is traced on fake CUDA tensors: no sync, no host copy."""

from __future__ import annotations

import itertools

import pytest
import torch
from fake_engines import CONTEXT, fake_builder, fake_modules
from method_variants import VARYING, reads_target, variants

from draftgraph.graphs import prefill_widths, verify_widths
from draftgraph.graphs.capture_guard import CaptureError, check_program, fake_cuda
from draftgraph.model_zoo.decoder import DecoderModel
from draftgraph.runtime.rounds import LogprobBuffers
from draftgraph.runtime.speculative_config import (
    REJECTION_SAMPLE_METHODS,
    SpeculativeConfig,
)

BUCKETS = (1, 4)


def cases() -> list[tuple[str | tuple[str, ...], dict[str, object], str]]:
    """Every variant with every rule; those that read the target with the rules that change what they draft."""
    return [
        (method, options, rule)
        for method, options in variants()
        for rule in REJECTION_SAMPLE_METHODS
        if not reads_target(method) or rule in ("standard", "coupled")
    ]


@pytest.mark.parametrize(("method", "options", "rule"), cases(), ids=str)
def test_every_step_of_every_program_is_capture_safe(method, options, rule):
    depth = None if method == "none" else 5
    spec = SpeculativeConfig(
        method=method,
        num_speculative_tokens=depth,
        rejection_sample_method=rule,
        synthetic_acceptance_length=1.0 if rule == "synthetic" else None,
        **options,
    )
    with fake_cuda() as device:
        builder, state = fake_builder(spec, device)
        buffers = LogprobBuffers(
            torch.zeros((5, CONTEXT, 4), device=device), torch.zeros((5, CONTEXT, 4), dtype=torch.int32, device=device)
        )
        for bucket in BUCKETS:
            widths = verify_widths(bucket, depth or 0)
            program = builder.round(bucket, widths, buffers, detailed=True)
            names = [step.name for step in program.steps()]
            expected = ["budget", *(f"verify[{w}]" for w in widths), "accept", "logprobs", "commit"]
            assert names == (expected if method == "none" else ["propose", *expected])
            assert check_program(program) == len(names)
        for width in prefill_widths(exact=False):
            assert check_program(builder.prefill(width)) == 1
        assert state.tokens.device.type == "cuda"


@pytest.mark.parametrize("options", VARYING, ids=str)
def test_the_steps_of_rounds_of_varying_depth_are_capture_safe(options):
    spec = SpeculativeConfig(**options, num_speculative_tokens=5)
    stepwise = spec.method in ("draft_model", "layerskip", "eagle3")
    with fake_cuda() as device:
        builder, _ = fake_builder(spec, device)
        for bucket in BUCKETS:
            program = builder.round(bucket, verify_widths(bucket, 5))
            names = [step.name for step in program.steps()]
            drafts = [f"draft[{step}]" for step in range(5)] if stepwise else []
            assert names[: names.index("budget")] == ["propose", *drafts]
            assert check_program(program) == len(names)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        *itertools.product(
            ({"method": "ngram"}, {"method": "layerskip", "exit_layer": 1}, {"method": "eagle", "model": "some/draft"}),
            ("shared caches", "latent"),
        ),
        ({"method": "mtp", "model": "some/draft"}, "shared caches"),
    ],
    ids=str,
)
def test_the_steps_of_other_targets_are_capture_safe(name, options):
    spec = SpeculativeConfig(**options, num_speculative_tokens=5)
    with fake_cuda() as device:
        builder, _ = fake_builder(spec, device, name)
        for bucket in BUCKETS:
            program = builder.round(bucket, verify_widths(bucket, 5))
            assert check_program(program) == len(list(program.steps()))
        assert check_program(builder.prefill(prefill_widths(exact=False)[0])) == 1


@pytest.mark.parametrize("layout", ["deepseek", "qwen", "mimo", "ernie"])
@pytest.mark.parametrize(("count", "target"), [(2, "dense"), (4, "latent"), (1, "gated")])
def test_the_steps_of_prediction_modules_are_capture_safe(monkeypatch, count, target, layout):
    """All in one turn, and in two; with latent attention and mixtures of experts too."""
    spec = SpeculativeConfig(method="mtp", num_speculative_tokens=4, draft_sample_method="probabilistic")
    monkeypatch.setattr("fake_engines.fake_head", lambda spec, model: fake_modules(model, count, layout))
    with fake_cuda() as device:
        builder, _ = fake_builder(spec, device, target)
        for bucket in BUCKETS:
            program = builder.round(bucket, verify_widths(bucket, 4))
            assert check_program(program) == len(list(program.steps()))
        assert check_program(builder.prefill(prefill_widths(exact=False)[0])) == 1


@pytest.mark.parametrize(
    "plant",
    [
        lambda t: t.sum().item(),
        lambda t: t.cpu(),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
    ],
    ids=["item", "cpu", "nonzero", "boolean index"],
)
def test_a_fault_planted_in_a_step_is_caught(plant, monkeypatch):
    with fake_cuda() as device:
        builder, _ = fake_builder(SpeculativeConfig(), device)
        program = builder.round(1, verify_widths(1, 0))
        check_program(program)
        original = DecoderModel.logits

        def logits(self: DecoderModel, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            plant(hidden)
            return original(self, hidden, out)

        monkeypatch.setattr(DecoderModel, "logits", logits)
        with pytest.raises(CaptureError, match=r"step 'verify\[4\]' cannot be captured"):
            check_program(program)
