"""From the data that a user names to examples: read, made up and answered by the target, or answered already."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...model_zoo.training.examples import Example, examples_hash
from ...model_zoo.training.files import replace_file
from ...model_zoo.training.loop import STATE_NAME
from ..errors import ConfigError
from ..progress import ProgressCallback
from .answering_progress import answering_progress
from .entries import self_made_count
from .regenerate import AnswerSettings, answer_prompts
from .request import TrainRequest
from .self_made import self_made_prompts
from .sources import load_examples, load_prompts
from .target_text import TargetText

if TYPE_CHECKING:
    from ..engine import Engine

_STAND_IN_PROMPT = 48
"""Tokens of a prompt that is not made up yet, in a dry run."""
_SELF_MADE_ROOM = 256
"""Tokens of the longest prompt that the target makes up, its template included, about."""

Note = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What there is to train on."""

    examples: tuple[Example, ...]
    """All different, in the order of the data."""
    stand_ins: int = 0
    """Of a dry run: examples whose answers are not there yet, and as long as they may become."""


class DataGatherer:
    """Gathers a run's examples; answers and prompts are kept in the run's directory."""

    def __init__(
        self,
        request: TrainRequest,
        target: Path,
        text: TargetText,
        fingerprint: str,
        *,
        dtype: str,
        device: str,
        progress: ProgressCallback,
        note: Note,
    ) -> None:
        """Loads nothing yet.

        Args:
            request: the run.
            target: the target's directory.
            text: how it reads text.
            fingerprint: of its weights.
            dtype: that it answers in.
            device: that it answers on.
            progress: told about downloads and prompts that are made up.
            note: told what each of the data gave, one line.
        """
        self._request, self._target, self._text, self._fingerprint = request, target, text, fingerprint
        self._dtype, self._device, self._progress, self._note = dtype, device, progress, note
        self._state = request.out / STATE_NAME
        self._answering = AnswerSettings(
            max_length=request.max_length,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.settings.seed,
        )

    def gather(self) -> Gathered:
        """The examples. What the target must write first is written, and kept.

        Raises:
            ConfigError: there is no usable text; see `load_prompts` and `load_examples`.
        """
        if not self._request.regenerate:
            return self._different(self._loaded())
        plan = [(data, self._prompts(data)) for data in self._request.data]
        kept = self._state / "examples.jsonl"
        key = self._key(plan)
        found = _read_kept(kept, key)
        if found is not None:
            return Gathered(examples=found)
        examples: list[Example] = []
        with contextlib.ExitStack() as stack:
            engine = stack.enter_context(self._engine())
            for number, (data, prompts) in enumerate(plan):
                if prompts is None:
                    prompts = self._made_up(engine, number, data)
                with answering_progress() as progress:
                    answers = answer_prompts(
                        engine,
                        prompts,
                        self._state / f"answers-{number}.jsonl",
                        self._answering,
                        progress,
                        target=self._fingerprint,
                    )
                self._note(f"{data}: {len(answers)} prompts answered")
                examples.extend(answers)
        gathered = self._different(examples)
        _keep(kept, key, gathered.examples)
        return gathered

    def gather_dry(self) -> Gathered:
        """The same without asking the target: where its answers are not there yet, stand-ins of the greatest length."""
        if not self._request.regenerate:
            return self._different(self._loaded())
        plan = [(data, self._prompts(data)) for data in self._request.data]
        found = _read_kept(self._state / "examples.jsonl", self._key(plan))
        if found is not None:
            return Gathered(examples=found)
        examples = []
        for data, prompts in plan:
            known = prompts or [
                tuple((number * 31 + place) % self._text.vocab_size for place in range(_STAND_IN_PROMPT))
                for number in range(self_made_count(data) or 0)
            ]
            for prompt in known:
                room = max(1, min(self._request.max_tokens, self._request.max_length - len(prompt)))
                examples.append(Example.answered(prompt, (prompt * (room // len(prompt) + 1))[:room]))
        return Gathered(examples=tuple(examples), stand_ins=len(examples))

    def _loaded(self) -> list[Example]:
        examples: list[Example] = []
        for data in self._request.data:
            loaded = load_examples(data, self._text, self._request.max_length, self._progress)
            self._note(f"{data}: {loaded.summary()}")
            examples.extend(loaded.items)
        return examples

    def _prompts(self, data: str) -> Sequence[tuple[int, ...]] | None:
        """The prompts of data; None where the target must make them up."""
        if self_made_count(data) is not None:
            return None
        loaded = load_prompts(data, self._text, self._request.max_length, self._progress)
        self._note(f"{data}: {loaded.summary()}")
        return loaded.items

    def _made_up(self, engine: Engine, number: int, data: str) -> Sequence[tuple[int, ...]]:
        count = self_made_count(data)
        assert count is not None
        file = self._state / f"prompts-{number}.jsonl"
        texts = self_made_prompts(engine, count, file, self._progress, target=self._fingerprint)
        prompts = [self._text.encode_prompt(self._text.chat_or_text(text)) for text in texts]
        fitting = [prompt for prompt in dict.fromkeys(prompts) if len(prompt) < self._request.max_length]
        if not fitting:
            raise ConfigError(
                f"all {len(prompts)} prompts of {data!r} are longer than a max_length of {self._request.max_length} "
                "tokens leaves room for: raise it"
            )
        return fitting

    def _engine(self) -> Engine:
        from ..engine import Engine

        request = self._request
        made_up = any(self_made_count(data) is not None for data in request.data)
        return Engine.from_pretrained(
            self._target,
            dtype=self._dtype,
            device=self._device,
            max_model_len=max(request.max_length, _SELF_MADE_ROOM if made_up else 0),
            max_batch_size=request.answer_rows,
            compile=request.compile,
            metrics="none",
        )

    def _key(self, plan: Sequence[tuple[str, Sequence[tuple[int, ...]] | None]]) -> str:
        """Of everything that the answers depend on."""
        digest = hashlib.sha256()
        said: dict[str, Any] = {
            "target": self._fingerprint,
            "dtype": self._dtype,
            "answering": repr(self._answering),
            "data": [
                data if prompts is None else hashlib.sha256(repr(list(prompts)).encode()).hexdigest()
                for data, prompts in plan
            ],
        }
        digest.update(json.dumps(said, sort_keys=True).encode())
        return digest.hexdigest()

    def _different(self, examples: Iterable[Example]) -> Gathered:
        return Gathered(examples=tuple(dict.fromkeys(examples)))


def _keep(file: Path, key: str, examples: Sequence[Example]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    head = {"key": key, "count": len(examples), "hash": examples_hash(examples)}
    with replace_file(file) as part, part.open("w", encoding="utf-8") as out:
        out.write(json.dumps(head) + "\n")
        out.writelines(json.dumps(example.to_json()) + "\n" for example in examples)


def _read_kept(file: Path, key: str) -> tuple[Example, ...] | None:
    """Examples that were kept under this key; None if there are none."""
    try:
        with file.open(encoding="utf-8") as lines:
            head = json.loads(next(lines))
            if head.get("key") != key:
                return None
            examples = tuple(Example.from_json(json.loads(line)) for line in lines)
    except (OSError, ValueError, StopIteration):
        return None
    return examples if examples_hash(examples) == head.get("hash") else None
