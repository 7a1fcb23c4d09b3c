"""A run's examples, of all the data that it names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...model_zoo.training.examples import Example
from ...model_zoo.training.files import replace_file
from ...model_zoo.training.loop import STATE_NAME
from ..errors import ConfigError
from ..progress import ProgressCallback
from .entries import self_made_count
from .prepare import ANSWERS_NAME, prepare_examples
from .request import TrainRequest
from .sources import load_examples, load_prompts
from .target_text import TargetText

if TYPE_CHECKING:
    from ..engine import Engine

_STAND_IN_PROMPT = 48
"""Tokens of a prompt that is not made up yet, in a dry run."""
_SELF_MADE_ROOM = 256
"""Tokens of the longest prompt that the target makes up, its template included, about."""
_SHARED_NAME = "examples.jsonl"

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What there is to train on."""

    examples: tuple[Example, ...]
    """All different, in the order of the data."""
    stand_ins: int = 0
    """Of a dry run: examples whose answers are not there yet, and as long as they may become."""


class DataGatherer:
    """Gathers a run's examples; what the target writes is kept in the run's directory."""

    def __init__(self, request: TrainRequest, target: Path, text: TargetText, *, dtype: str, device: str) -> None:
        """Loads nothing yet.

        Args:
            request: the run.
            target: the target's directory.
            text: how it reads text.
            dtype: that it answers in.
            device: that it answers on.
        """
        self._request, self._target, self._text = request, target, text
        self._dtype, self._device = dtype, device

    def gather(self, accelerator: Any, note: Note) -> Gathered:
        """The examples. What the target must write first is written by the first process, for which the others wait.

        Args:
            accelerator: accelerate's.
            note: told what each of the data gave, one line.

        Raises:
            ConfigError: there is no usable text; see `prepare_examples`.
        """
        shared = self._request.out / STATE_NAME / _SHARED_NAME
        if not accelerator.is_main_process:
            accelerator.wait_for_everyone()
            with shared.open(encoding="utf-8") as lines:
                return Gathered(examples=tuple(Example.from_json(json.loads(line)) for line in lines))
        examples: list[Example] = []
        for number, data in enumerate(self._request.data):
            found = prepare_examples(
                self._request.data_options(data),
                self._target,
                self._directory(number),
                self._engine,
                dtype=self._dtype,
                say=lambda line, data=data: note(f"{data}: {line}"),  # type: ignore[misc]
            )
            examples.extend(found)
        gathered = _different(examples)
        if accelerator.num_processes > 1:
            with replace_file(shared) as part, part.open("w", encoding="utf-8") as out:
                out.writelines(json.dumps(example.to_json()) + "\n" for example in gathered.examples)
        accelerator.wait_for_everyone()
        return gathered

    def gather_dry(self, note: Note, progress: ProgressCallback) -> Gathered:
        """The same without asking the target: where its answers are not there yet, stand-ins of the greatest length.

        Args:
            note: see `gather`.
            progress: told about downloads.

        Raises:
            ConfigError: there is no usable text.
        """
        request, examples, stand_ins = self._request, list[Example](), 0
        for number, data in enumerate(request.data):
            answers = self._directory(number) / ANSWERS_NAME
            if not request.regenerate or answers.is_file():
                name = str(answers) if request.regenerate else data
                loaded = load_examples(name, self._text, request.max_length, progress)
                note(f"{name}: {loaded.summary()}")
                examples.extend(loaded.items)
                continue
            prompts: Sequence[tuple[int, ...]] = [
                tuple((start * 31 + place) % self._text.vocab_size for place in range(_STAND_IN_PROMPT))
                for start in range(self_made_count(data) or 0)
            ]
            if not prompts:
                found = load_prompts(data, self._text, request.max_length, progress)
                note(f"{data}: {found.summary()}")
                prompts = found.items
            for prompt in prompts:
                room = min(request.max_tokens, request.max_length - len(prompt))
                if room > 0:
                    examples.append(Example.answered(prompt, (prompt * (room // len(prompt) + 1))[:room]))
                    stand_ins += 1
        if not examples:
            raise ConfigError(f"a max_length of {request.max_length} tokens leaves no room for an answer: raise it")
        return Gathered(examples=_different(examples).examples, stand_ins=stand_ins)

    def _directory(self, number: int) -> Path:
        return self._request.out / STATE_NAME / f"data-{number}"

    def _engine(self) -> Engine:
        from ..engine import Engine

        request = self._request
        made_up = any(self_made_count(data) is not None for data in request.data)
        return Engine.from_pretrained(
            self._target,
            dtype=self._dtype,
            device=self._device,
            max_model_len=max(request.max_length, min(_SELF_MADE_ROOM, self._text.max_positions) if made_up else 0),
            max_batch_size=request.answer_rows,
            compile=request.compile,
            metrics="none",
        )


def _different(examples: Iterable[Example]) -> Gathered:
    return Gathered(examples=tuple(dict.fromkeys(examples)))
