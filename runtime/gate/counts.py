"""Counts that do not vary from run to run: what programs are made of, and what they do with a fixed prompt."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ...graphs import Program, Step, Switch, While
from ...graphs.capture_guard import CaptureError, check_step, fake_cuda
from ...graphs.program import Node, Sequence
from ...kernels.launch_recorder import record_launches
from ...model_zoo.decoder import DecoderWeights, LayerWeights
from ...profiling.floor import RoundShape
from ..engine import Engine
from ..models import cached_model, model_source
from ..sampling_params import SamplingParams
from ..speculative_config import SpeculativeConfig
from .fixed_model import PROMPT, fixed_engine, fixed_weights
from .rig import make_rig

DRAFTS = 4
TOKENS = 96
"""Of the answer of the fixed model."""
BUCKETS = (1, 4)
RULES = ("standard", "block", "coupled")
_ALLOCATIONS = ("aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided")
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "matmul", "linear")
_SMOLLM2 = "smollm2-135m"
_SMOLLM2_TOKENS = 32
_SMOLLM2_PROMPT = "Repeat this: the quick brown fox jumps over the lazy dog. The quick brown fox"


def program_counts() -> dict[str, int]:
    """Of every program, traced on fake CUDA tensors: its nodes, each step's kernels, and the steps a graph cannot hold.

    The last is the number of steps that wait for the device, copy to the host or have shapes that depend on data.
    """
    counts: dict[str, int] = {}
    with fake_cuda() as device:
        for speculation in _speculations():
            for bucket in BUCKETS:
                rig = make_rig(speculation, _shapes(device), bucket=bucket)
                label = _label(speculation)
                _count_program(counts, f"{label} {rig.round.name}", rig.round)
                if bucket == BUCKETS[0] and not speculation.num_speculative_tokens:
                    _count_program(counts, rig.prefill.name, rig.prefill)
    return counts


def _speculations() -> list[SpeculativeConfig]:
    """Plain decoding, and n-gram drafts under every rule of verification."""
    drafted = [
        SpeculativeConfig(method="ngram", num_speculative_tokens=DRAFTS, rejection_sample_method=rule) for rule in RULES
    ]
    return [SpeculativeConfig(), *drafted]


def _label(speculation: SpeculativeConfig) -> str:
    if not speculation.num_speculative_tokens:
        return "+".join(speculation.methods)
    return f"{'+'.join(speculation.methods)} {speculation.num_speculative_tokens} {speculation.rejection_sample_method}"


def _shapes(device: torch.device) -> DecoderWeights:
    """The fixed model's weights without data, bfloat16."""

    def empty(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else torch.empty(tensor.shape, dtype=torch.bfloat16, device=device)

    weights = fixed_weights_shapes()
    layers = tuple(LayerWeights(*(empty(tensor) for tensor in layer)) for layer in weights.layers)  # type: ignore[arg-type]
    embedding, norm, head = (empty(t) for t in (weights.embedding, weights.final_norm, weights.head))
    return DecoderWeights(embedding, layers, norm, head)  # type: ignore[arg-type]


@functools.cache
def fixed_weights_shapes() -> DecoderWeights:
    """The fixed weights, made once, for their shapes alone."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    with unset_fake_temporarily():
        return fixed_weights()


def _count_program(counts: dict[str, int], label: str, program: Program) -> None:
    counts[f"{label}: nodes"] = _nodes(program.root)
    refused = 0
    for step in program.steps():
        try:
            check_step(step, program.state)
        except CaptureError:
            refused += 1  # and what it would launch cannot be traced
        else:
            counts[f"{label} {step.name}: kernels"] = kernels_of(step, program)
    counts[f"{label}: steps a graph cannot hold"] = refused


def _nodes(node: Node) -> int:
    match node:
        case Sequence():
            return 1 + sum(map(_nodes, node.nodes))
        case While():
            return 1 + _nodes(node.body)
        case Switch():
            return 1 + sum(map(_nodes, node.branches))
        case Step():
            return 1


class _TorchKernels(TorchDispatchMode):
    """Counts torch's ops that write memory: each is a kernel, while views and allocations launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        writes = func._schema.is_mutable or any(_memory(leaf) not in given for leaf in made)
        self.count += writes and func._schema.name not in _ALLOCATIONS
        return result


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def kernels_of(step: Step, program: Program) -> int:
    """Kernels that one step launches on a GPU: those of our ops, recorded, and one for each of torch's ops that writes.

    Uncompiled; in a compiled region fewer of torch's are left. Call it inside `fake_cuda`. Raises `RuntimeError` where
    Triton is absent.
    """
    with torch.inference_mode(), _TorchKernels() as torch_kernels, record_launches() as launches:
        step.fn(program.state)
    return torch_kernels.count + len(launches)


def region_counts() -> dict[str, int]:
    """Matrix products in the graph of each compiled region of the fixed model at one width."""
    counts: dict[str, int] = {}

    def region(function: Any) -> Any:
        def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
            products = sum(1 for node in graph.graph.nodes if _is_product(node))
            counts[f"region {function.__name__}: matrix products"] = products
            return graph

        return torch.compile(function, fullgraph=True, dynamic=False, backend=count)

    torch._dynamo.reset()
    rig = make_rig(SpeculativeConfig(), fixed_weights(), compile_region=region)
    with torch.inference_mode():
        next(step for step in rig.round.steps() if step.name.startswith("verify")).fn(rig.state)
    torch._dynamo.reset()
    return counts


def _is_product(node: torch.fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.split(".")[0] in _PRODUCTS


def byte_counts() -> dict[str, int]:
    """The least bytes that each step of a round of the fixed model moves in bfloat16: one row, 128 tokens cached."""
    shape = RoundShape(rows=1, width=8, window=DRAFTS + 1, context=128, num_drafts=DRAFTS, dtype=torch.bfloat16)
    with fixed_engine(_speculations()[1]) as engine:
        costs = engine.round_costs(shape)
    return {f"{phase}: least bytes": round(cost.bytes) for phase, cost in costs.items()}


def answer_counts() -> dict[str, int]:
    """Rounds, verified and accepted drafts of the fixed model's answer to the fixed prompt, in float32, greedily.

    And how many tokens of it are not those of plain decoding, which must be none.
    """
    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    with fixed_engine() as engine:
        counts, plain = _answer(engine, list(PROMPT), params, "fixed model, plain")
    for speculation in _speculations()[1:]:
        label = f"fixed model, {_label(speculation)}"
        with fixed_engine(speculation) as engine:
            found, tokens = _answer(engine, list(PROMPT), params, label)
        unlike = sum(a != b for a, b in itertools.zip_longest(tokens, plain))
        counts |= {**found, f"{label}: tokens unlike plain decoding's": unlike}
    return counts


def smollm2_counts() -> dict[str, int]:
    """The same of SmolLM2-135M-Instruct, run eagerly; empty where it is not in the cache."""
    path = cached_model(_SMOLLM2)
    if path is None:
        return {}
    params = SamplingParams(max_tokens=_SMOLLM2_TOKENS, ignore_eos=True)
    speculation = SpeculativeConfig(method="ngram", num_speculative_tokens=DRAFTS)
    options: dict[str, Any] = {"dtype": "float32", "compile": False, "max_batch_size": 1, "max_model_len": 256}
    with Engine.from_pretrained(path, speculation, **options) as engine:
        # Copies of the model differ a little: counts of one say nothing about another.
        label = f"{_SMOLLM2} ({model_source(path)}), {_label(speculation)}"
        return _answer(engine, _SMOLLM2_PROMPT, params, label)[0]


def is_optional(name: str) -> bool:
    """Whether some machines cannot measure a count: the model is not in every cache."""
    return name.startswith(_SMOLLM2)


def _answer(engine: Engine, prompt: Any, params: SamplingParams, label: str) -> tuple[dict[str, int], tuple[int, ...]]:
    result: Any = engine.generate(prompt, params)
    metrics = result.metrics
    counts = {
        f"{label}: rounds": metrics.rounds,
        f"{label}: drafts verified": metrics.proposed_tokens,
        f"{label}: drafts accepted": metrics.accepted_tokens,
    }
    return counts, result.token_ids
