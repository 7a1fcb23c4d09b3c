"""`SamplingParams`: how the tokens of one request are chosen and when it ends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .checks import check_bool, check_integer, check_number
from .errors import RequestError

MAX_STOP_TOKEN_IDS = 7
"""Stop tokens of one request besides the end-of-sequence token: the device keeps 8 in all."""
MAX_LOGPROBS = 20
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e5
"""What a temperature other than 0 may be: float32 holds any logit divided by it."""
MAX_N = 16384


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The parameters of one request. The default is greedy decoding.

    Raises:
        RequestError: a value of the wrong type or out of its range.
    """

    temperature: float = 0.0
    """Divides the logits: 0, the default, is greedy decoding, else 1e-5 to 1e5."""
    top_k: int = 0
    """Sample among this many likeliest tokens; 0 or -1 keeps every token."""
    top_p: float = 1.0
    """Sample among the likeliest tokens whose probabilities reach this sum, in (0, 1]."""
    min_p: float = 0.0
    """Drop tokens less likely than this share of the likeliest one, in [0, 1]."""
    seed: int | None = None
    """Key of the random numbers, a signed 64-bit integer. None: the engine draws one and reports it."""
    max_tokens: int = 256
    """The most tokens of the answer."""
    stop: str | Sequence[str] = ()
    """Strings that end the answer; the text is cut before them. Kept as a tuple."""
    stop_token_ids: Sequence[int] = ()
    """At most 7 tokens that end the answer, besides the model's end-of-sequence tokens. Kept as a tuple."""
    ignore_eos: bool = False
    """Go on after the model's end-of-sequence token."""
    logprobs: int | None = None
    """Return the log-probability of every token and of this many likeliest ones, 0 to 20. None: neither."""
    n: int = 1
    """Answers per prompt, at most 16384; answer i is sampled with `seed + i`."""

    def __post_init__(self) -> None:
        check_number(RequestError, "temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, got {self.temperature!r}: logits "
                "divided by less overflow"
            )
        check_integer(RequestError, "top_k", self.top_k, -1, 2**31 - 1)
        check_number(RequestError, "top_p", self.top_p, 0.0, 1.0, low_included=False)
        check_number(RequestError, "min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            check_integer(RequestError, "seed", self.seed, -(2**63), 2**63 - 1)
        check_integer(RequestError, "max_tokens", self.max_tokens, 1, 2**31 - 1)
        check_integer(RequestError, "n", self.n, 1, MAX_N)
        if self.logprobs is not None:
            check_integer(RequestError, "logprobs", self.logprobs, 0, MAX_LOGPROBS)
        check_bool(RequestError, "ignore_eos", self.ignore_eos)
        object.__setattr__(self, "top_k", max(self.top_k, 0))
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_token_ids(self.stop_token_ids))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as it is kept: a tuple of strings."""
        return tuple(self.stop)

    @property
    def greedy(self) -> bool:
        """Whether no random number decides a token."""
        return self.temperature == 0.0


def _stop_strings(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    strings = (stop,) if isinstance(stop, str) else stop
    if not isinstance(strings, (list, tuple)) or any(not isinstance(text, str) for text in strings):
        raise RequestError(f"stop must be a string or a list of strings, got {stop!r}")
    if "" in strings:
        raise RequestError("stop must not hold the empty string, which every answer contains")
    return tuple(strings)


def _stop_token_ids(ids: Any) -> tuple[int, ...]:
    if ids is None:
        return ()
    if not isinstance(ids, (list, tuple)):
        raise RequestError(f"stop_token_ids must be a list of token ids, got {ids!r}")
    for token in ids:
        check_integer(RequestError, "each of stop_token_ids", token, 0, 2**31 - 1)
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise RequestError(f"stop_token_ids holds at most {MAX_STOP_TOKEN_IDS} ids, got {len(ids)}")
    return tuple(ids)
