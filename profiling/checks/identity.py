"""Whether every executor on a device gives the tokens that the host executor gives on the CPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...graphs import compile_region, eager_region
from ...runtime.head_loading import LoadedHead
from ...runtime.sampling_params import SamplingParams
from ...runtime.speculative_config import METHODS, SpeculativeConfig
from .cycle_speculator import CycleSpeculator
from .random_heads import MOST_DRAFTS, random_head
from .random_models import SHAPES, drafter_config, random_engine, random_model

CONTEXT = 256
PROMPTS = ([5, 6, 30, 31, 90], [100, 101, 102], list(range(40, 75)), [7] * 20)
SAMPLING = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.8, top_p=0.95, seed=11),
}
DRAFTS = MOST_DRAFTS


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


RULES = ("standard", "block", "coupled")
"""Of verification; those that promise the same tokens again for the same seed and method."""


def checked_methods() -> list[str]:
    """The methods that this version has."""
    return [name for name, method in METHODS.items() if method.available]


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
    tokens: int = 32,
    on_engine: Callable[[Any, str], None] | None = None,
) -> Iterator[Identity]:
    """Compares every executor on `device` with the host executor on the CPU, in float32.

    Args:
        device: the device to check.
        executors: names, as `random_engine` takes them.
        shapes: of `random_models.SHAPES`. The first is checked under every rule, the others under "coupled".
        compile: compile the models on `device`.
        tokens: of each answer.
        on_engine: called with each engine and the executor's name before it answers.
    """
    for number, shape in enumerate(shapes):
        on_cpu, there = _Models(shape, torch.device("cpu"), False), _Models(shape, device, compile)
        known: dict[tuple[str, ...], list[list[int]]] = {}
        for method in checked_methods():
            for rule in RULES if number == 0 else RULES[-1:]:
                spec = _spec(method, rule)
                for name, sampling in SAMPLING.items():
                    params = dataclasses.replace(sampling, max_tokens=tokens)
                    # Greedy and coupled texts are those of plain decoding, whatever drafts; the others have their own.
                    plain = name == "greedy" or rule == "coupled"
                    key = (name,) if name == "greedy" else (name, rule) if plain else (name, rule, method)
                    if key not in known:
                        asked = _spec("none", rule) if plain else spec
                        known[key] = _answers(shape, on_cpu, asked, "cpu", "host", params)
                    for executor in executors:
                        total, equal, error = sum(map(len, known[key])), 0, ""
                        try:
                            got = _answers(shape, there, spec, str(device), executor, params, on_engine)
                            total, equal = compare_tokens(known[key], got)
                        except Exception as problem:  # the page lists it, and the other comparisons go on
                            error = f"{type(problem).__name__}: {problem}"
                        yield Identity(shape, method, rule, name, executor, total, equal, error)


class _Models:
    """A target and its drafters, the same on every device."""

    def __init__(self, shape: str, device: torch.device, compile: bool) -> None:
        build: dict[str, Any] = {"dtype": torch.float32, "device": device, "compile": compile, "max_positions": CONTEXT}
        self.target = random_model(SHAPES[shape], **build)
        self._drafter = random_model(drafter_config(SHAPES[shape]), seed=1, **build)
        self._region = compile_region if compile else eager_region
        self._head: tuple[str, LoadedHead] | None = None

    def drafter(self, method: str) -> dict[str, Any]:
        """What `random_engine` is to be given for a method, of the heads one in memory at a time."""
        if METHODS[method].language_model:
            return {"draft": self._drafter}
        if METHODS[method].reads_target:
            if self._head is None or self._head[0] != method:
                self._head = None  # lets go of the one before
                made = random_head(method, self.target, max_positions=CONTEXT, compile_region=self._region)
                self._head = method, made
            return {"head": self._head[1]}
        return {}


def _spec(method: str, rule: str) -> SpeculativeConfig:
    traits = METHODS[method]
    return SpeculativeConfig(
        method=method,
        model="random" if traits.needs_model else None,
        num_speculative_tokens=DRAFTS if traits.drafts else None,
        rejection_sample_method=rule,
        exit_layer=1 if traits.exits_early else None,
        speculator=f"{CycleSpeculator.__module__}:{CycleSpeculator.__name__}" if traits.user_class else None,
        # When finished requests begin to help others depends on the executor. Except under "coupled" a sampled text
        # depends on the drafts, so there they must not.
        suffix_decoding_max_cached_requests=10000 if rule == "coupled" else 0,
    )


def _answers(
    shape: str,
    models: _Models,
    speculative: SpeculativeConfig,
    device: str,
    executor: str,
    params: SamplingParams,
    on_engine: Callable[[Any, str], None] | None = None,
) -> list[list[int]]:
    method = speculative.method
    assert isinstance(method, str)  # no list of methods is checked
    engine = random_engine(
        shape,
        models.target,
        **models.drafter(method),
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
