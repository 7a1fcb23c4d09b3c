"""What `draftgraph train` is asked for, checked before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...model_zoo.training.option_fields import make_options, option_fields
from ...model_zoo.training.registry import trainable
from ...model_zoo.training.settings import TrainingSettings
from ..checks import check_choice, check_integer, check_number
from ..errors import ConfigError
from .prepare import DataOptions

STATES = ("online", "offline", "hybrid")
DTYPES = ("auto", "float32", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
DRAFT_VOCABULARY = 8192
"""Tokens that a head can draft, unless more or fewer are asked for."""


@dataclass(frozen=True, kw_only=True)
class TrainRequest:
    """One run.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
        TrainingConfigError: the method or one of its options is unknown, or out of range.
    """

    method: str
    target: str
    data: tuple[str, ...]
    out: Path
    settings: TrainingSettings = field(default_factory=TrainingSettings)
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the method, by name: values, or texts as `--option` takes them."""
    regenerate: bool = True
    """The target answers the data's prompts; else the data has the answers."""
    max_tokens: int = 256
    max_length: int = 1024
    temperature: float = 0.0
    answer_rows: int = 16
    """Prompts that the target answers together."""
    compile: bool = True
    """Compile the target that answers."""
    states: str = "online"
    states_dir: Path | None = None
    """None: in the run's own directory."""
    draft_vocab_size: int | None = None
    """None: `DRAFT_VOCABULARY`, or all of the target's where it has no more or the method drafts from all."""
    intermediate_size: int | None = None
    init_from: Path | None = None
    learn_prompts: bool = False
    drop_held_out: bool = False
    """Examples that share text with the prompts that heads are measured on are dropped."""
    held_out: float = 0.05
    target_dtype: str = "auto"
    device: str = "auto"

    def __post_init__(self) -> None:
        method = trainable(self.method)
        make_options(self.method, method.options, self.options)
        if not self.data:
            raise ConfigError("there is no data to train on: name some with --data")
        for data in self.data:
            self.data_options(data)
        check_choice(ConfigError, "states", self.states, STATES)
        check_choice(ConfigError, "target_dtype", self.target_dtype, DTYPES)
        check_choice(ConfigError, "device", self.device, DEVICES)
        if self.states_dir is not None and self.states == "online":
            raise ConfigError("--states-dir is where --states offline or hybrid keeps hidden states; online keeps none")
        check_integer(ConfigError, "answer_rows", self.answer_rows, 1)
        for name in ("draft_vocab_size", "intermediate_size"):
            if getattr(self, name) is not None:
                check_integer(ConfigError, name, getattr(self, name), 1)
        if self.draft_vocab_size is not None and not method.reduced_vocabulary:
            raise ConfigError(
                f"{self.method} drafts from all of the target's tokens: --draft-vocab-size does not apply"
            )
        check_number(ConfigError, "held_out", self.held_out, 0.0, 0.9, low_included=False)
        if self.init_from is not None and not (self.init_from / "model.safetensors").is_file():
            raise ConfigError(
                f"--init-from {str(self.init_from)!r} is no exported head: a directory with a model.safetensors is "
                "expected"
            )

    @property
    def head_options(self) -> Any:
        """The method's options object."""
        return make_options(self.method, trainable(self.method).options, self.options)

    def data_options(self, data: str) -> DataOptions:
        """How examples are made of one of `data`."""
        return DataOptions(
            data=data,
            max_length=self.max_length,
            regenerate=self.regenerate,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            seed=self.settings.seed,
            drop_held_out=self.drop_held_out,
        )

    @property
    def num_drafts(self) -> int:
        """Tokens that the head learns to draft."""
        return int(self.head_options.num_drafts)

    @property
    def states_directory(self) -> Path:
        """Where hidden states are kept."""
        return self.states_dir or self.out / "training" / "states"

    def vocabulary_size(self, vocab_size: int) -> int:
        """How many of the target's tokens the head can draft.

        Raises:
            ConfigError: more than there are.
        """
        size = self.draft_vocab_size
        if size is None:
            return min(vocab_size, DRAFT_VOCABULARY) if trainable(self.method).reduced_vocabulary else vocab_size
        if size > vocab_size:
            raise ConfigError(
                f"the draft vocabulary must have 1 to {vocab_size} tokens, as many as the target has, got {size}"
            )
        return size


def with_named(method: str, options: Mapping[str, str], **named: int | None) -> dict[str, Any]:
    """Options given by `--option` and those that have a flag of their own.

    Args:
        method: of the head.
        options: by name, as text.
        named: by name, None where the flag was not given.

    Raises:
        ConfigError: one is given in both ways, or the method has none of that name.
    """
    fields = option_fields(trainable(method).options)
    found: dict[str, Any] = dict(options)
    for name, value in named.items():
        if value is None:
            continue
        flag = f"--{name.replace('_', '-')}"
        if name not in fields:
            raise ConfigError(f"{flag} does not apply to {method}, whose options are {', '.join(fields)}")
        if name in found:
            raise ConfigError(f"{name} is given twice, by {flag} and by --option")
        found[name] = value
    return found


def split_options(pairs: tuple[str, ...]) -> dict[str, str]:
    """`name=value` by name.

    Raises:
        ConfigError: one has another form, or comes twice.
    """
    found: dict[str, str] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        name = name.strip().replace("-", "_")
        if not equals or not name:
            raise ConfigError(f"an option is given as name=value, got {pair!r}")
        if name in found:
            raise ConfigError(f"option {name} is given twice")
        found[name] = value
    return found
