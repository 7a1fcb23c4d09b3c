"""From `--data` to examples: read, made up and answered by the target, as it was asked for."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ...model_zoo.training.examples import Example
from ...model_zoo.training.fingerprint import fingerprint
from ..checks import check_integer
from ..errors import ConfigError
from ..progress import terminal_progress
from .answering_progress import answering_progress
from .entries import check_data_name, self_made_count
from .held_out import held_out_texts, without_held_out
from .regenerate import AnswerSettings, answer_prompts
from .self_made import SelfMadeSettings, self_made_prompts, user_turn
from .sources import load_examples, load_prompts
from .target_text import TargetText

if TYPE_CHECKING:
    from ..engine import Engine

PROMPTS_NAME, ANSWERS_NAME = "prompts.jsonl", "answers.jsonl"


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """What to train on.

    Raises:
        ConfigError: the data is not there, or needs `regenerate`.
        RequestError: a sampling parameter is out of range.
    """

    data: str
    """As `--data` names it: see `read_entries`, and `self:COUNT` for prompts that the target makes up."""
    max_length: int = 512
    """Of an example, in tokens."""
    regenerate: bool = False
    """Whether the target answers the prompts itself; answers that the data has are dropped."""
    max_tokens: int = 256
    """Of an answer of the target."""
    temperature: float = 0.0
    """Of the target's answers."""
    seed: int = 0
    """Of the prompts and answers of the target."""
    drop_held_out: bool = False
    """Whether examples are dropped that share text with the prompts that heads are measured on, see `overlap`."""

    def __post_init__(self) -> None:
        check_integer(ConfigError, "seed", self.seed, 0, 2**31 - 1)
        _ = self.answers
        check_data_name(self.data)
        if self_made_count(self.data) is not None and not self.regenerate:
            raise ConfigError(f"the prompts of {self.data!r} must be answered by the target, too: add --regenerate")

    @property
    def answers(self) -> AnswerSettings:
        """How the target answers."""
        return AnswerSettings(
            max_length=self.max_length, max_tokens=self.max_tokens, temperature=self.temperature, seed=self.seed
        )


def prepare_examples(
    options: DataOptions,
    directory: Path,
    out: Path,
    open_engine: Callable[[], Engine],
    *,
    dtype: str,
    say: Callable[[str], None],
) -> tuple[Example, ...]:
    """Makes the examples, showing progress on the terminal.

    Args:
        options: what is asked for.
        directory: the target's.
        out: where `prompts.jsonl` and `answers.jsonl` are written, and where an earlier run may have begun them.
        open_engine: opens the target; called only if it has something to write, and closed before this returns.
        dtype: that the engine has, which its answers depend on.
        say: told in a line what was found and what was left out.

    Raises:
        ConfigError: the data cannot be used; says why.
        FetchError: a prompt set could not be brought to this machine.
    """
    target = TargetText.of_directory(directory)
    count = self_made_count(options.data)
    if count is not None:
        user_turn(target.tokenizer)
    with contextlib.ExitStack() as stack:
        engine = functools.cache(lambda: stack.enter_context(open_engine()))
        if not options.regenerate:
            with terminal_progress() as progress:
                loaded = load_examples(options.data, target, options.max_length, progress)
            examples = loaded.items
            say(f"examples: {loaded.summary()}")
        else:
            made_by = {"target": fingerprint(directory), "dtype": dtype}
            with terminal_progress() as progress:
                if count is None:
                    prompts = load_prompts(options.data, target, options.max_length, progress)
                    said = prompts.summary()
                    asked = prompts.items
                else:
                    settings = SelfMadeSettings(seed=options.seed)
                    file = out / PROMPTS_NAME
                    made = self_made_prompts(engine, target.tokenizer, count, file, progress, settings, made_by=made_by)
                    encoded = [target.encode_prompt([{"role": "user", "content": text}]) for text in made]
                    asked = tuple(ids for ids in dict.fromkeys(encoded) if len(ids) < options.max_length)
                    said = f"{len(asked)} of {len(made)} made up by the target used"
            say(f"prompts: {said}")
            with answering_progress() as answering:
                file = out / ANSWERS_NAME
                examples = answer_prompts(engine, asked, file, options.answers, answering, made_by=made_by)
            say(f"answers: {len(examples)}, {sum(len(e.answer_tokens()) for e in examples)} tokens")
    if options.drop_held_out:
        with terminal_progress() as progress:
            texts = held_out_texts(progress)
        examples, dropped = without_held_out(examples, target, texts)
        say(f"examples that share text with held-out prompts: {dropped} dropped")
        if not examples:
            raise ConfigError(f"all examples of {options.data!r} share text with held-out prompts: none is left")
    return examples
