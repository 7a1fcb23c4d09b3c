"""Whether every executor on a device gives the tokens that the host executor gives on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...model_zoo.decoder import DecoderModel
from ...runtime.sampling_params import SamplingParams
from ...runtime.speculative_config import METHODS, SpeculativeConfig
from .random_models import SHAPES, random_engine, random_model

CONTEXT = 256
PROMPTS = ([5, 6, 30, 31, 90], [100, 101, 102], list(range(40, 75)), [7] * 20)
SAMPLING = {
    "greedy": SamplingParams(max_tokens=32),
    "sampled": SamplingParams(max_tokens=32, temperature=0.8, top_p=0.95, seed=11),
}
DRAFTS = 5


@dataclass(frozen=True)
class Identity:
    """One comparison of token ids."""

    shape: str
    method: str
    rule: str
    sampling: str
    executor: str
    tokens: int
    """Compared, of all prompts together."""
    equal: int
    """Of these, the tokens up to the first difference of each prompt."""
    error: str = ""
    """What was raised instead of an answer."""

    @property
    def passed(self) -> bool:
        """Whether every token is the same."""
        return not self.error and self.tokens == self.equal

    def to_dict(self) -> dict[str, Any]:
        """In types that JSON has."""
        return {**asdict(self), "passed": self.passed}


def methods_without_weights() -> list[str]:
    """The methods that this version has and that need no checkpoint of their own."""
    return [name for name, method in METHODS.items() if method.available and not method.needs_model]


def compare_tokens(wanted: list[list[int]], got: list[list[int]]) -> tuple[int, int]:
    """The number of tokens wanted, and how many of them come before each prompt's first difference."""
    total = sum(map(len, wanted))
    equal = 0
    for expected, actual in zip(wanted, got, strict=True):
        same = 0
        while same < min(len(expected), len(actual)) and expected[same] == actual[same]:
            same += 1
        # An answer that goes on too long differs too.
        equal += same if len(actual) <= len(expected) else max(0, same - 1)
    return total, equal


def check_identities(
    device: torch.device,
    executors: tuple[str, ...],
    *,
    shapes: tuple[str, ...] = ("tiny",),
    compile: bool = False,
    on_engine: Callable[[Any, str], None] | None = None,
) -> Iterator[Identity]:
    """Compares every executor on `device` with the host executor on the CPU, in float32.

    Args:
        device: the device to check.
        executors: names, as `EngineConfig.executor` takes them.
        shapes: of `random_models.SHAPES`.
        compile: compile the models on `device`.
        on_engine: called with each engine and the executor's name before it answers.
    """
    for shape in shapes:
        build = {"dtype": torch.float32, "max_positions": CONTEXT}
        reference = random_model(SHAPES[shape], device=torch.device("cpu"), compile=False, **build)  # type: ignore[arg-type]
        model = random_model(SHAPES[shape], device=device, compile=compile, **build)  # type: ignore[arg-type]
        for method in methods_without_weights():
            for rule in ("standard", "coupled"):
                spec = SpeculativeConfig(
                    method=method,
                    num_speculative_tokens=None if method == "none" else DRAFTS,
                    rejection_sample_method=rule,
                    # When finished requests begin to help others depends on the executor. Under "standard" a sampled
                    # text depends on the drafts, so there they must not.
                    suffix_decoding_max_cached_requests=0 if rule == "standard" else 10000,
                )
                wanted = {
                    name: _answers(shape, reference, spec, "cpu", "host", params) for name, params in SAMPLING.items()
                }
                for executor in executors:
                    for name, params in SAMPLING.items():
                        total, equal, error = sum(map(len, wanted[name])), 0, ""
                        try:
                            got = _answers(shape, model, spec, str(device), executor, params, on_engine)
                            total, equal = compare_tokens(wanted[name], got)
                        except Exception as problem:  # the page lists it, and the other comparisons go on
                            error = f"{type(problem).__name__}: {problem}"
                        yield Identity(shape, method, rule, name, executor, total, equal, error)


def _answers(
    shape: str,
    model: DecoderModel,
    speculative: SpeculativeConfig,
    device: str,
    executor: str,
    params: SamplingParams,
    on_engine: Callable[[Any, str], None] | None = None,
) -> list[list[int]]:
    engine = random_engine(
        shape,
        model,
        speculative=speculative,
        dtype="float32",
        device=device,
        executor=executor,
        max_model_len=CONTEXT,
        max_batch_size=2,
    )
    with engine:
        if on_engine is not None:
            on_engine(engine, executor)
        # Four prompts over two rows: rows finish while others run, and others wait for their slots.
        return [list(result.token_ids) for result in engine.generate([*PROMPTS], params)]
