"""The target answers the prompts that a head is to be trained on: heads learn to draft what the target writes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...model_zoo.training.examples import Example
from ..checks import check_integer
from ..errors import ConfigError, DraftgraphError
from ..sampling_params import SamplingParams
from .journal import Journal
from .many_requests import Answers, answers_as_done

if TYPE_CHECKING:
    from ..engine import Engine


@dataclass(frozen=True, kw_only=True)
class AnswerSettings:
    """How the target answers.

    Raises:
        ConfigError: a length is out of range.
        RequestError: a sampling parameter is.
    """

    max_length: int
    """Of a prompt and its answer together, in tokens."""
    max_tokens: int = 256
    """Of an answer."""
    temperature: float = 0.0
    """0 is greedy: what a head that serves greedy decoding should learn."""
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    """Prompt i is answered with `seed + i`."""

    def __post_init__(self) -> None:
        check_integer(ConfigError, "max_length", self.max_length, 2)
        check_integer(ConfigError, "seed", self.seed, -(2**62), 2**62)
        self.params(0, 1)

    def params(self, number: int, prompt_length: int) -> SamplingParams:
        """For prompt `number`, of `prompt_length` tokens."""
        return SamplingParams(
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            seed=self.seed + number,
            max_tokens=min(self.max_tokens, max(1, self.max_length - prompt_length)),
        )


@dataclass(frozen=True, kw_only=True)
class Answering:
    """How far the answering is."""

    done: int
    """Prompts answered, with those of earlier runs."""
    total: int
    tokens: int
    """Of the answers of this run."""
    seconds: float
    """Since this run began to answer."""
    answered: int
    """Prompts answered by this run."""

    @property
    def tokens_per_second(self) -> float:
        """Of all rows together."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def seconds_left(self) -> float | None:
        """At the speed so far; None before the first answer."""
        return self.seconds * (self.total - self.done) / self.answered if self.answered else None


AnsweringCallback = Callable[[Answering], None]


def answer_prompts(
    engine: Callable[[], Engine],
    prompts: Sequence[tuple[int, ...]],
    file: Path,
    settings: AnswerSettings,
    progress: AnsweringCallback,
    *,
    made_by: Mapping[str, Any],
) -> tuple[Example, ...]:
    """Lets the target answer prompts, and keeps each answer in `file` as soon as it is there.

    A run that was killed goes on with the prompts that have no answer yet. More prompts may be put behind those that
    the file has answers to. The file can be trained on by itself, as `--data`.

    Args:
        engine: gives the target's; called only if an answer is missing.
        prompts: token ids, each shorter than `settings.max_length`.
        file: JSON lines, made if it is not there: a line with the settings, then in the order in which they ended
            the prompts' `number`, `prompt_ids`, `answer`, `finish` and `token_ids`, the answer's tokens with the one
            that ended it.
        settings: how to answer.
        progress: called after every answer.
        made_by: what the answers depend on besides `settings`: what tells the target's weights from others, such as
            `fingerprint` gives, and their type.

    Returns:
        An example per prompt, without those whose logits were not finite.

    Raises:
        ConfigError: the file cannot be used, was made by other settings, by another target or from other prompts; a
            prompt is too long; says which.
        DraftgraphError: no prompt could be answered.
    """
    too_long = next((number for number, prompt in enumerate(prompts) if len(prompt) >= settings.max_length), None)
    if not prompts or too_long is not None:
        found = f"prompt {too_long} has {len(prompts[too_long])} tokens" if too_long is not None else "there is none"
        raise ConfigError(f"prompts of at most {settings.max_length - 1} tokens are needed to be answered; {found}")
    with Journal(file, "answers", {**made_by, **asdict(settings)}) as journal:
        known = {entry["number"]: entry for entry in (_checked(file, entry) for entry in journal.entries)}
        for number, prompt in enumerate(prompts):
            if number in known and tuple(known[number]["prompt_ids"]) != tuple(prompt):
                raise ConfigError(
                    f"the answer to prompt {number} in {str(file)!r} is to another prompt: it was made from other "
                    "data; remove the file, or name another directory"
                )
        missing = [number for number in range(len(prompts)) if number not in known]
        requests = ((prompts[number], settings.params(number, len(prompts[number]))) for number in missing)
        answers: Iterable[tuple[int, Answers]] = answers_as_done(engine(), requests) if missing else ()
        start, tokens = time.perf_counter(), 0
        for answered, (place, (answer,)) in enumerate(answers, start=1):
            number = missing[place]
            known[number] = {
                "number": number,
                "prompt_ids": list(prompts[number]),
                "answer": answer.text,
                "finish": answer.finish_reason,
                "token_ids": list(answer.token_ids),
            }
            journal.add([known[number]])
            tokens += len(answer.token_ids)
            progress(
                Answering(
                    done=len(prompts) - len(missing) + answered,
                    total=len(prompts),
                    tokens=tokens,
                    seconds=time.perf_counter() - start,
                    answered=answered,
                )
            )
    used = [known[number] for number in range(len(prompts))]
    examples = tuple(
        Example.answered(entry["prompt_ids"], entry["token_ids"])
        for entry in used
        if entry["finish"] in ("stop", "length") and entry["token_ids"]
    )
    if not examples:
        raise DraftgraphError(
            f"the target answered none of {len(prompts)} prompts: its logits are not finite; try another dtype"
        )
    return examples


def _checked(file: Path, entry: dict[str, Any]) -> dict[str, Any]:
    lists = all(
        isinstance(entry.get(key), list) and all(type(token) is int for token in entry[key])
        for key in ("prompt_ids", "token_ids")
    )
    if not lists or type(entry.get("number")) is not int or not isinstance(entry.get("finish"), str):
        raise ConfigError(f"the answers in {str(file)!r} are damaged at {str(entry)[:80]!r}: repair or remove the file")
    return entry
