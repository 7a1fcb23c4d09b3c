"""The settings of a bench, checked before anything is fetched or loaded."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from ..checks import check_integer, check_number
from ..errors import ConfigError
from ..sampling_params import SamplingParams
from ..speculative_config import SpeculativeConfig
from ..verification import repeats_plain_text
from .prompt_sets import check_set_name, split_limit

MAX_CONCURRENCY = 16
PEERS = ("transformers",)
DEFAULT_SPECULATIVE = tuple(SpeculativeConfig(method="ngram", num_speculative_tokens=depth) for depth in (4, 8))
DEFAULT_PROMPT_SETS = ("echo", "chat")
DEFAULT_ROWS = 4
"""Rows of the engine when requests come at a rate of their own."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """How requests come: a number of clients, each of which waits for its answer, or by chance at a rate."""

    concurrency: int = 1
    """Requests that are always under way; with an arrival rate, the rows of the engine."""
    arrival_rate: float | None = None
    """Requests per second on average, whether or not earlier ones are answered. None: see `concurrency`."""

    def due_times(self, count: int, seed: int) -> list[float] | None:
        """When each of `count` requests is due, in seconds from the start; None: whenever a client is free.

        Requests come as a Poisson process: the times between them are exponential, with mean 1 / rate.
        """
        if self.arrival_rate is None:
            return None
        chance = random.Random(seed)
        return list(accumulate(chance.expovariate(self.arrival_rate) for _ in range(count)))

    @property
    def alone(self) -> bool:
        """Whether one request at a time is answered."""
        return self.concurrency == 1 and self.arrival_rate is None


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """What is measured, and how.

    Raises:
        ConfigError: a value out of its range, or two that contradict each other.
        RequestError: a sampling parameter out of its range.
        NotAvailableError: a speculative config that this version does not have.
    """

    speculative: tuple[SpeculativeConfig, ...] = DEFAULT_SPECULATIVE
    """What is compared with plain decoding, which is always measured."""
    prompt_sets: tuple[str, ...] = DEFAULT_PROMPT_SETS
    limit: int | None = None
    """Most prompts of a set that does not say so itself, as "humaneval:40" does; None: all."""
    temperature: float = 0.0
    seed: int = 0
    """Prompt i of repeat r is sampled with `seed + r * 10000 + i`, by every method."""
    max_tokens: int = 80
    ignore_eos: bool | None = None
    """Go on after the end token, so that all answers have `max_tokens` tokens. None: only where the methods' texts
    differ by design, because they are sampled and not coupled: otherwise equal texts end at equal lengths, and what
    a model writes after its end is no fair test of a drafter."""
    concurrency: int | None = None
    """Requests under way at once, 1 to 16; None: 1, or no bound with an arrival rate."""
    arrival_rate: float | None = None
    """Requests per second on average."""
    repeats: int = 2
    timeout: float = 120.0
    """Seconds after which an answer is cut off, between two rounds."""
    peers: tuple[str, ...] = ()
    assistant: str | None = None
    """The peer's draft model: a name as `resolve_model` takes it."""

    def __post_init__(self) -> None:
        _ = self.sampling(0)
        check_integer(ConfigError, "seed", self.seed, 0, 2**31 - 1)
        check_integer(ConfigError, "repeats", self.repeats, 1)
        check_number(ConfigError, "timeout", self.timeout, 0.0, low_included=False)
        if self.limit is not None:
            check_integer(ConfigError, "limit", self.limit, 1)
        self._check_load()
        self._check_methods()
        self._check_sets()
        self._check_peers()

    def sampling(self, number: int) -> SamplingParams:
        """The sampling parameters of a request whose seed is `seed + number`."""
        return SamplingParams(
            temperature=self.temperature,
            seed=self.seed + number,
            max_tokens=self.max_tokens,
            ignore_eos=self.fixed_length,
        )

    @property
    def fixed_length(self) -> bool:
        """Whether every answer goes on to `max_tokens` tokens."""
        if self.ignore_eos is not None:
            return self.ignore_eos
        return not all(repeats_plain_text(config, self.temperature) for config in self.speculative)

    @property
    def load(self) -> Load:
        """How requests come."""
        rows = 1 if self.arrival_rate is None else DEFAULT_ROWS
        return Load(concurrency=self.concurrency or rows, arrival_rate=self.arrival_rate)

    def to_dict(self) -> dict[str, Any]:
        """Every setting, in types that JSON has."""
        return {
            "speculative": [config.to_dict() for config in self.speculative],
            "prompt_sets": list(self.prompt_sets),
            "limit": self.limit,
            "temperature": self.temperature,
            "seed": self.seed,
            "max_tokens": self.max_tokens,
            "ignore_eos": self.fixed_length,
            "concurrency": self.load.concurrency,
            "arrival_rate": self.arrival_rate,
            "repeats": self.repeats,
            "timeout": self.timeout,
            "peers": list(self.peers),
            "assistant": self.assistant,
        }

    def _check_load(self) -> None:
        if self.concurrency is not None:
            check_integer(ConfigError, "concurrency", self.concurrency, 1, MAX_CONCURRENCY)
        if self.arrival_rate is not None:
            check_number(ConfigError, "arrival_rate", self.arrival_rate, 0.0, low_included=False)
            if self.concurrency is not None:
                raise ConfigError(
                    f"concurrency ({self.concurrency}) and arrival_rate ({self.arrival_rate:g}) exclude each other: "
                    "requests come either when a client is free or at a rate"
                )

    def _check_methods(self) -> None:
        for config in self.speculative:
            config.require_available()
            if not config.traits.drafts:
                raise ConfigError("plain decoding is measured anyway: give speculative configs with other methods")
        labels = Counter(method_label(config) for config in self.speculative)
        twice = next((label for label, count in labels.items() if count > 1), None)
        if twice is not None:
            raise ConfigError(f"the speculative config {twice!r} is given twice")

    def _check_sets(self) -> None:
        if not self.prompt_sets:
            raise ConfigError("there is nothing to ask: name a prompt set")
        for name in self.prompt_sets:
            check_set_name(name)
        bare = [split_limit(name)[0] for name in self.prompt_sets]
        names = Counter(Path(name).stem if name.endswith(".jsonl") else name for name in bare)
        twice = next((name for name, count in names.items() if count > 1), None)
        if twice is not None:
            raise ConfigError(f"two prompt sets are called {twice!r}")

    def _check_peers(self) -> None:
        for peer in self.peers:
            if peer not in PEERS:
                raise ConfigError(f"there is no peer {peer!r}; peers: {', '.join(PEERS)}")
        if self.peers and not self.load.alone:
            raise ConfigError(
                "a peer answers one prompt at a time: leave out concurrency and arrival_rate to compare with it"
            )
        if self.assistant is not None and not self.peers:
            raise ConfigError(f"assistant is {self.assistant!r}, the draft model of a peer, but no peer is named")


def method_label(config: SpeculativeConfig) -> str:
    """A short name: the method, K, and what differs from the method's defaults."""
    depth = config.num_speculative_tokens
    usual = SpeculativeConfig(
        method=config.method,
        model=config.model,
        num_speculative_tokens=depth,
        exit_layer=config.exit_layer,
        speculator=config.speculator,
    ).to_dict()
    parts = ["+".join(config.methods)]
    if config.model is not None:
        parts.append(Path(config.model).name)
    if config.speculator is not None:
        parts.append(config.speculator)
    if config.exit_layer is not None:
        parts.append(f"E={config.exit_layer}")
    if depth is not None:
        parts.append(f"K={depth}")
    parts += [f"{key}={value}" for key, value in config.to_dict().items() if usual.get(key) != value]
    return " ".join(parts)
