"""What a bench sees of one answer, and of the prompts that were answered together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from ..prompts import Prompt

Status = Literal["ok", "failed", "timeout"]
"""ok: ended by itself; failed: see `error`; timeout: cut off after the time allowed for one answer."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One prompt of a prompt set."""

    prompt_set: str
    name: str
    """Tells the prompts of a set apart."""
    prompt: Prompt


@dataclass(frozen=True, kw_only=True)
class Job:
    """One case as all methods get it: the same token ids, the same seed."""

    case: Case
    prompt_ids: tuple[int, ...]
    error: str | None
    """Why the prompt cannot be asked, such as its length; None when it can."""
    repeat: int
    seed: int


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way of answering prompts, as tables and plots call it."""

    name: str
    engine: str
    """draftgraph, or the peer."""
    family: str
    """What differs from other methods of the same family is only K."""
    depth: int | None
    """K, the most drafts per round; 0 for plain decoding; None where it is not fixed."""
    config: Mapping[str, Any]
    """The speculative config, or the arguments of the peer's call."""
    repeats_plain_text: bool = False
    """Whether it promises the text of plain decoding, up to rounding."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What was seen of one answer. Times are seconds since the request was due."""

    prompt_set: str
    prompt: str
    repeat: int
    status: Status
    error: str | None = None
    finish_reason: str | None = None
    prompt_tokens: int = 0
    token_ids: tuple[int, ...] = ()
    bursts: tuple[tuple[float, int], ...] = ()
    """(when, how many tokens) of each burst: tokens that one round emits arrive together."""
    latency: float = 0.0
    """Until the answer ended."""
    rounds: int | None = None
    """Target passes that emitted the tokens; None where they cannot be counted."""
    histogram: tuple[tuple[int, ...], ...] | None = None
    """[K + 1][K + 1]: rounds by (drafts verified, drafts accepted); None where they cannot be seen."""

    @property
    def key(self) -> tuple[str, str, int]:
        """What answers of different methods are paired by."""
        return (self.prompt_set, self.prompt, self.repeat)

    def to_dict(self) -> dict[str, Any]:
        """Every field, in types that JSON has."""
        return {
            "prompt_set": self.prompt_set,
            "prompt": self.prompt,
            "repeat": self.repeat,
            "status": self.status,
            "error": self.error,
            "finish_reason": self.finish_reason,
            "prompt_tokens": self.prompt_tokens,
            "token_ids": list(self.token_ids),
            "bursts": [[when, count] for when, count in self.bursts],
            "latency": self.latency,
            "rounds": self.rounds,
        }


def refused(job: Job, error: str) -> Answer:
    """The answer to a job that could not be begun."""
    return Answer(
        prompt_set=job.case.prompt_set,
        prompt=job.case.name,
        repeat=job.repeat,
        status="failed",
        error=error,
        prompt_tokens=len(job.prompt_ids),
    )


def one_line(error: BaseException) -> str:
    """An error's kind and message on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Prompts that one method answered together: one prompt, or as many as the load says."""

    method: str
    answers: tuple[Answer, ...]
    seconds: float
    """From the first request to the end of the last answer."""
    complete: bool = True
    """False when it was interrupted: then `seconds` says nothing."""


@dataclass(frozen=True, kw_only=True)
class StepSpan:
    """One run of one step: when it began, in seconds since the first round did, and how long it took."""

    phase: str
    start: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """Where the time of the rounds went, from a replay under a step timer."""

    phase_seconds: Mapping[str, float]
    """By step without its width, summed over the rounds, in the order of a round."""
    round_seconds: float
    """Wall time of those rounds."""
    rounds: int
    timeline: tuple[StepSpan, ...] = ()
    """The steps of the first rounds of the first answer, in order."""
    round_starts: tuple[float, ...] = ()
    """When these rounds began; the last entry is when the last one ended."""
    timeline_ends: bool = False
    """Whether these are all rounds of an answer, or else only its first ones."""
    round_tokens: tuple[int, ...] = ()
    """Tokens that these rounds emitted; empty where several requests shared a round."""
    bytes_per_round: float | None = None
    """What a round must move at least, on average."""
    floor_seconds: float | None = None
    """The least time of an average round on this device."""

    @property
    def accounted(self) -> float:
        """The share of the wall time that the steps add up to."""
        return sum(self.phase_seconds.values()) / self.round_seconds if self.round_seconds else 0.0
