"""Everything that a training run needs, made of what was asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from ...model_zoo.safetensors_files import read_json
from ...model_zoo.training import checkpoints
from ...model_zoo.training.draft_vocabulary import DraftVocabulary
from ...model_zoo.training.examples import Example, examples_hash
from ...model_zoo.training.fingerprint import fingerprint
from ...model_zoo.training.head_size import learning_parameters, planned_head
from ...model_zoo.training.loop import STATE_NAME
from ...model_zoo.training.registry import trainable
from ...model_zoo.training.shards import ShardStore, StateIdentity
from ...model_zoo.training.source import ExampleSource, written_spans
from ...model_zoo.training.split import split_examples
from ...model_zoo.training.target import FrozenTarget
from ...model_zoo.training.trainee import Trainee
from ...model_zoo.training.vocabulary import choose_vocabulary, count_tokens, coverage, size_for
from ...model_zoo.training.warm_start import WarmStart, check_warm_start, warm_start
from ..engine_config import EngineConfig
from ..errors import ConfigError
from ..models import resolve_model
from ..progress import ProgressCallback
from ..speculative_config import SpeculativeConfig
from .data import DataGatherer, Gathered
from .differences import difference_text
from .entries import data_digest
from .memory import available_bytes, check_fits, need_of
from .processes import first_alone
from .request import TrainRequest
from .target_text import TargetText

MOST = 0.9
"""The share of the target's tokens that a draft vocabulary had better have."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The target, looked at from outside."""

    directory: Path
    config: Mapping[str, Any]
    """Its config.json, of the text model."""
    text: TargetText
    fingerprint: str
    dtype: torch.dtype
    device: torch.device
    parameters: int
    """Of the head that is to be trained."""
    learning: int
    """Of them, those that learn."""


@dataclass(frozen=True, kw_only=True)
class Ready:
    """A run that can begin."""

    place: Place
    trainee: Trainee
    gathered: Gathered
    train: tuple[Example, ...]
    held_out: tuple[Example, ...]
    train_source: ExampleSource
    held_out_source: ExampleSource
    coverage: float
    """The share of the target's tokens that the draft vocabulary has."""
    size_for_most: int
    """Tokens of a draft vocabulary that has `MOST` of them."""
    warm: WarmStart | None
    stored_bytes: int
    """That the hidden states of all examples take on disk, where they are kept."""

    def flush(self) -> None:
        """Puts hidden states that were computed on the disk, where they are kept."""
        self.train_source.flush()
        self.held_out_source.flush()


def look_at_target(request: TrainRequest, accelerator: Any, progress: ProgressCallback) -> Place:
    """Finds the target and checks what its files tell, before anything large is read.

    Raises:
        ConfigError: the draft vocabulary is too large, examples may be longer than the target takes, it does not fit
            memory, or the method cannot be trained beside it.
        TrainingConfigError: the head to begin with is none, or does not fit.
        DraftgraphError: there is no such target.
    """
    directory = first_alone(accelerator, lambda: resolve_model(request.target, progress=progress))
    text = TargetText.of_directory(directory)
    if request.max_length > text.max_positions:
        raise ConfigError(
            f"--max-length is {request.max_length}, but {request.target!r} was made for at most {text.max_positions} "
            "tokens"
        )
    hf = read_json(directory / "config.json")
    config = {**hf, **(hf.get("text_config") or {})}
    device = accelerator.device
    engine = EngineConfig(
        speculative=SpeculativeConfig(method="none"), dtype=request.target_dtype, device=str(device.type)
    )
    size = request.vocabulary_size(text.vocab_size)
    try:
        planned = planned_head(
            request.method,
            config,
            request.head_options,
            draft_vocab_size=size,
            intermediate_size=request.intermediate_size,
        )
    except ValueError as error:
        raise _cannot_be_made(request.method, error) from None
    if request.init_from is not None:
        check_warm_start(planned, request.init_from)
    place = Place(
        directory=directory,
        config=config,
        text=text,
        fingerprint=fingerprint(directory),
        dtype=engine.torch_dtype,
        device=device,
        parameters=sum(parameter.numel() for parameter in planned.parameters()),
        learning=learning_parameters(planned),
    )
    need = need_of(
        directory,
        config,
        dtype=_name(place.dtype),
        head_parameters=place.learning,
        draft_vocab_size=size,
        num_drafts=request.num_drafts,
        batch_tokens=request.settings.batch_tokens,
    )
    check_fits(need, available_bytes(device.type), request.target)
    return place


def gatherer(request: TrainRequest, place: Place) -> DataGatherer:
    """What makes the run's examples."""
    return DataGatherer(request, place.directory, place.text, dtype=_name(place.dtype), device=place.device.type)


def identity_before_data(request: TrainRequest, place: Place) -> dict[str, Any]:
    """What the result depends on, as far as it is known before the data is."""
    settings = asdict(request.settings)
    del settings["save_every"]  # when a checkpoint is written changes nothing
    weights = None if request.init_from is None else (request.init_from / "model.safetensors").read_bytes()
    return {
        "method": request.method,
        "data": data_digest(request.data),
        **{f"option {name}": value for name, value in asdict(request.head_options).items()},
        **settings,
        "target": place.fingerprint[:16],
        "target_dtype": _name(place.dtype),
        "held_out": request.held_out,
        "states": request.states,
        "drop_held_out": request.drop_held_out,
        "learn_prompts": request.learn_prompts,
        "intermediate_size": request.intermediate_size,
        "draft_vocab_size": request.vocabulary_size(place.text.vocab_size),
        "init_from": None if weights is None else hashlib.sha256(weights).hexdigest()[:16],
    }


def check_run(request: TrainRequest, identity: Mapping[str, Any], accelerator: Any, *, partly: bool) -> None:
    """Compares the run with the one that its directory holds, and that with its checksums; see `checkpoints`."""
    state, names = request.out / STATE_NAME, {"target": request.target}
    if request.init_from is not None:
        names["init_from"] = str(request.init_from)

    def compare() -> None:
        checkpoints.check_identity(state, identity, partly=partly, names=names, describe=difference_text)
        if partly:
            checkpoints.check(state)

    first_alone(accelerator, compare)


def make_ready(
    request: TrainRequest,
    place: Place,
    gathered: Gathered,
    accelerator: Any,
    *,
    progress: ProgressCallback,
    identified: Callable[[dict[str, Any]], None] = lambda identity: None,
    keeps_states: bool = True,
) -> Ready:
    """Splits the examples, loads the target and makes the head beside it.

    Args:
        request: the run.
        place: the target.
        gathered: the examples.
        accelerator: accelerate's.
        progress: told how far the hidden states are.
        identified: told everything that the result depends on, before the target is loaded; may refuse.
        keeps_states: hidden states are kept on disk where the request says so; not in a dry run.

    Raises:
        TrainingDataError: there are too few examples, or no room for their hidden states.
        TrainingConfigError: the head to begin with does not fit.
        ConfigError: the method cannot be trained beside this target, the head could draft nothing of what it wrote, or
            the processes cannot share hidden states.
    """
    train, held_out = split_examples(gathered.examples, request.held_out, request.settings.seed)
    counts = count_tokens(train, place.text.vocab_size)
    size = request.vocabulary_size(place.text.vocab_size)
    keep = [token for token in place.text.end_ids if token < place.text.vocab_size]
    ids = choose_vocabulary(counts, size, keep[:size])
    covered, size_for_most = coverage(ids, counts), size_for(counts, MOST, keep)
    if not covered and not gathered.stand_ins:
        raise ConfigError(
            f"with --draft-vocab-size {size} the head could draft nothing of what the target wrote; {size_for_most} "
            f"tokens would be {MOST:.0%} of it"
        )
    identified(
        {
            **identity_before_data(request, place),
            "examples": examples_hash(gathered.examples)[:16],
            "vocabulary": hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:16],
        }
    )
    target = FrozenTarget(place.directory, dtype=place.dtype, device=place.device, name=request.target)
    facts = target.facts()
    torch.manual_seed(request.settings.seed)
    try:
        vocabulary = DraftVocabulary(ids, facts.embedding.shape[0])
        trainee = trainable(request.method).build(
            facts, target.layer_shape(request.intermediate_size), vocabulary, request.head_options
        )
    except ValueError as error:
        raise _cannot_be_made(request.method, error) from None
    warm = None if request.init_from is None else warm_start(trainee, request.init_from)
    trainee.to(place.device)
    layers = trainee.states_of(target.num_layers)
    stores = [
        _store_identity(place, examples, layers, facts.embedding.shape[1], place.dtype)
        for examples in (train, held_out)
    ]
    splits = list(zip((train, held_out), stores, strict=True))
    kept: list[ShardStore | None] = [None, None]
    if keeps_states and request.states != "online":
        kept = first_alone(accelerator, lambda: [*_stores_with_room(request, splits, accelerator)])
    spans = (written_spans(train) if request.learn_prompts else None, None)
    sources = [
        _source(request, ExampleSource(examples, target, layers, store=store, spans=own), store, accelerator, progress)
        for examples, store, own in zip((train, held_out), kept, spans, strict=True)
    ]
    return Ready(
        place=place,
        trainee=trainee,
        gathered=gathered,
        train=train,
        held_out=held_out,
        train_source=sources[0],
        held_out_source=sources[1],
        coverage=covered,
        size_for_most=size_for_most,
        warm=warm,
        stored_bytes=sum(
            identity.bytes_per_token * len(example.tokens)
            for examples, identity in zip((train, held_out), stores, strict=True)
            for example in examples
        ),
    )


def _stores_with_room(
    request: TrainRequest, splits: Sequence[tuple[Sequence[Example], StateIdentity]], accelerator: Any
) -> list[ShardStore]:
    """Where the splits' hidden states are kept. All of them have room together, before any is computed."""
    if request.states == "hybrid" and accelerator.num_processes > 1:
        raise ConfigError(
            f"--states hybrid keeps what one process computes, and there are {accelerator.num_processes}: use offline"
        )
    stores = [
        # Heads that read the same states of the same examples find them here.
        ShardStore(request.states_directory / identity.digest()[:16], identity, rank=accelerator.process_index)
        for _, identity in splits
    ]
    stores[0].require_room(
        len(examples[index].tokens)
        for (examples, _), store in zip(splits, stores, strict=True)
        for index in store.missing()
    )
    return stores


def _source(
    request: TrainRequest,
    source: ExampleSource,
    store: ShardStore | None,
    accelerator: Any,
    progress: ProgressCallback,
) -> ExampleSource:
    """What gives the batches of a split, with all of its hidden states on disk where they are computed first."""

    def fill() -> None:
        if store is not None and request.states == "offline":
            store.refresh()  # the first process may have filled it meanwhile
            source.fill(
                request.settings.batch_tokens,
                lambda done, total: progress(done, total, f"hidden states of {total} examples"),
            )

    first_alone(accelerator, fill)
    return source


def _store_identity(
    place: Place, examples: Sequence[Example], layers: tuple[int, ...], hidden_size: int, dtype: torch.dtype
) -> StateIdentity:
    return StateIdentity(
        target=place.fingerprint,
        layers=layers,
        hidden_size=hidden_size,
        dtype=_name(dtype),
        examples=examples_hash(examples),
        count=len(examples),
    )


def _cannot_be_made(method: str, error: ValueError) -> ConfigError:
    return ConfigError(f"a head of method {method} cannot be made beside this target: {error}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
