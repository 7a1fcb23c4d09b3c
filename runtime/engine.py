"""The engine: loads a model and answers prompts."""

from __future__ import annotations

import dataclasses
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from ..graphs import CaptureReport
from ..profiling.floor import ModelSizes, RoundShape, StepCost, prefill_cost, round_costs
from ..profiling.nvtx_ranges import NvtxRanges, wanted
from ..profiling.observer import Observer
from .adaptive import AdaptiveBudget
from .core import EngineCore
from .detokenizer import IncrementalDetokenizer
from .engine_config import EngineConfig
from .errors import ConfigError, DraftgraphError, RequestError
from .loading import LoadedModel, build_core, load_target
from .model_sizes import model_sizes
from .outputs import GenerationResult
from .prompts import Prompt, encode_prompt, is_batch
from .request import Request
from .sampling_params import SamplingParams
from .speculative_config import SpeculativeConfig
from .stream import TokenStream

Progress = Callable[[int, int, str], None]
"""Called with the number of things done, their total, and what is being done."""

Answer = GenerationResult | tuple[GenerationResult, ...]
"""One result; with `SamplingParams.n` above 1, a tuple of n."""

_SEED_SPAN = 2**64
_TAIL = 4
"""Prompt tokens given to the detokenizer as context; enough for any incomplete character."""


class Engine:
    """A target model, its drafter and their decode state, ready to answer.

    Create it with `Engine.from_pretrained`; close it with `close` or by leaving its `with` block. It may be used
    from several threads: they take turns, round by round.
    """

    def __init__(self, target: LoadedModel, core: EngineCore, config: EngineConfig) -> None:
        """Use `from_pretrained` instead."""
        self._target, self._core = target, core
        self.config = config
        self.tokenizer = target.tokenizer
        self.model_path: Path = target.path
        """The local directory of the weights in use."""
        self._decoder_config = target.config
        self._lock = threading.RLock()
        self._closed = False
        if wanted():
            core.attach(NvtxRanges(), on_host=False)

    @classmethod
    def from_pretrained(
        cls,
        model: str | Path,
        speculative_config: SpeculativeConfig | dict[str, Any] | str | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_model_len: int | None = None,
        max_batch_size: int = 4,
        batch_buckets: Sequence[int] | None = None,
        compile: bool = True,
        exact: bool = False,
        executor: str = "auto",
        attention_backend: str = "auto",
        metrics: str = "summary",
        prefix_caching: bool = True,
        progress: Progress | None = None,
    ) -> Engine:
        """Loads a model and everything its rounds need.

        Args:
            model: a local directory, a GGUF file, a hub id, or an alias such as `smollm2-135m`.
            speculative_config: how to draft, as a `SpeculativeConfig`, a dict or JSON; None decodes plainly.
            dtype: of weights and KV: float32, bfloat16, float16 or auto.
            device: cpu, cuda or auto, which is cpu.
            max_model_len: most tokens of a sequence, prompt and answer together.
            max_batch_size: sequences that decode together; more are queued.
            batch_buckets: padded batch sizes, ascending; the last holds `max_batch_size`.
            compile: compile the decoder layer and the head; the first round at each width then takes seconds,
                see `warmup`.
            exact: run plain and speculative rounds at one width, so that not even near-ties of bfloat16 flip.
            executor: loop, round, host or auto.
            attention_backend: sdpa or auto.
            metrics: none, summary or detailed.
            prefix_caching: reuse the KV a free slot holds for the beginning of a new prompt.
            progress: called as the model is fetched, if it must be, and as its weights are loaded. By default a
                fetch shows a bar on the terminal, and loading shows nothing.

        Raises:
            DraftgraphError: a setting or the model cannot be used; says which value and what would be accepted.
            CheckpointError: the weights are damaged or do not fit their config.
            UnsupportedModelError: the model's family is not supported.
        """
        try:
            wanted()
        except ValueError as error:
            raise ConfigError(str(error)) from None
        speculative = SpeculativeConfig.parse(speculative_config)
        config = EngineConfig(
            speculative=speculative,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            max_batch_size=max_batch_size,
            batch_buckets=_as_tuple(batch_buckets),
            compile=compile,
            exact=exact,
            executor=executor,
            attention_backend=attention_backend,
            metrics=metrics,
            prefix_caching=prefix_caching,
        )
        target = load_target(model, config, progress)
        config = dataclasses.replace(config, speculative=target.speculative or speculative)
        return cls(target, build_core(target, config), config)

    def generate(
        self, prompt: Prompt | Sequence[Prompt], params: SamplingParams | None = None
    ) -> Answer | list[Answer]:
        """Answers one prompt or a list of them.

        Args:
            prompt: a string, token ids or chat messages; a list of these gives a list of answers, in order.
            params: how to sample and when to stop; greedy, 256 tokens at most, by default.

        Returns:
            A `GenerationResult`, or a tuple of `params.n` of them; a list of those for a list of prompts. A row
            whose logits are not finite ends with `finish_reason` "error" and disturbs no other.

        Raises:
            RequestError: a prompt is empty, too long or outside the vocabulary. Nothing has run then.
        """
        params = _checked(params)
        batch = is_batch(prompt)
        prompts: Sequence[Any] = prompt if batch else [prompt]
        groups = [self._requests(p, params) for p in prompts]  # all are checked before any runs
        requests = [request for group in groups for request in group]
        try:
            self._submit(requests)
            self._advance_until_done(requests)
        finally:
            self._cancel(requests)
        answers = [_answer(group) for group in groups]
        return answers if batch else answers[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> TokenStream:
        """Answers one prompt piece by piece.

        Returns an iterator of `StreamChunk`; with `params.n` above 1 the samples' chunks interleave, told apart by
        `index`. The last chunk of a sample carries its result. Raises `RequestError` as `generate` does.
        """
        requests = self._requests(prompt, _checked(params))
        self._submit(requests)
        return TokenStream(self, requests)

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids that a prompt is fed as; raises `RequestError` as `generate` does."""
        self._require_open()
        target = self._target
        return encode_prompt(
            prompt, self.tokenizer, vocab_size=target.config.vocab_size, max_model_len=target.max_model_len
        )

    def warmup(self, progress: Progress | None = None) -> CaptureReport:
        """Compiles every step of every program, and captures it where the executor does, so that nothing is later.

        `progress` is called before each step and once at the end. Returns which graphs were captured: their nodes,
        megabytes and seconds (`CaptureReport.table`); none with the host executor.

        Raises:
            CaptureError: a step cannot be captured; names it and the reason.
        """
        with self._lock:
            self._require_open()
            self._core.warmup(progress)
            return self._core.capture_report

    def export_acceptance(self) -> dict[str, Any] | None:
        """What adaptive verification has learned of the drafter, ready for JSON and `import_acceptance`.

        None without adaptive verification, and with a drafter that says itself how likely its drafts are to stand.
        """
        with self._lock:
            self._require_open()
            self._core.pause()
            budget = self._core.budget
            return budget.export() if isinstance(budget, AdaptiveBudget) else None

    def import_acceptance(self, learned: Mapping[str, Any]) -> None:
        """Begins with what another engine of the same models has learned, rather than with nothing.

        Raises:
            ConfigError: not what `export_acceptance` gives, or this engine learns nothing.
        """
        with self._lock:
            self._require_open()
            self._core.pause()
            budget = self._core.budget
            if not isinstance(budget, AdaptiveBudget):
                raise ConfigError("this engine learns nothing of its drafter: set enable_adaptive_verification")
            budget.load(learned)

    @contextmanager
    def observe(self, observer: Observer) -> Iterator[None]:
        """Lets an observer, such as a `StepTimer`, watch all that the engine does inside the `with` block.

        Meanwhile the host executor runs the programs, one step at a time, whatever executor the engine has: the
        tokens are the same, and only there can steps be told apart. Several observers may be attached at once, at
        any time and from any thread; each takes effect between two rounds. Raises `ValueError` for one that is
        attached already.
        """
        with self._lock:
            self._require_open()
            self._core.attach(observer, on_host=True)
        try:
            yield
        finally:
            with self._lock:
                if not self._closed:
                    self._core.detach(observer)

    @cached_property
    def model_sizes(self) -> ModelSizes:
        """What the floor counts with."""
        return model_sizes(self._decoder_config)

    def round_costs(self, shape: RoundShape) -> dict[str, StepCost]:
        """The least that each phase of a round of this engine must move and compute; `shape` gives the dtypes."""
        with self._lock:
            self._require_open()
            propose = self._core.propose_cost(shape)
            return round_costs(self.model_sizes, shape, propose, first_layer=self._core.first_layer)

    def prefill_cost(self, *, width: int, tokens: float, context: float) -> StepCost:
        """The least that a prefill chunk must move and compute: `tokens` of `width`, after `context` cached ones."""
        dtype = self.config.torch_dtype
        return prefill_cost(self.model_sizes, width=width, tokens=tokens, context=context, dtype=dtype)

    def close(self) -> None:
        """Cancels what is running and lets go of the model and the state; the engine cannot be used afterwards."""
        with self._lock:
            if not self._closed:
                self._core.abort(None)
                self._closed = True
                del self._core, self._target

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _requests(self, prompt: Any, params: SamplingParams) -> list[Request]:
        """The requests of one prompt, `params.n` of them."""
        ids, target = self.encode(prompt), self._target
        stop = (*(() if params.ignore_eos else target.config.eos_token_ids), *params.stop_token_ids)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        return [
            Request(
                prompt_ids=ids,
                params=params,
                seed=(seed + index + _SEED_SPAN // 2) % _SEED_SPAN - _SEED_SPAN // 2,
                index=index,
                limit=min(len(ids) + params.max_tokens, target.max_model_len),
                stop_token_ids=tuple(dict.fromkeys(stop)),
                detokenizer=IncrementalDetokenizer(
                    self.tokenizer, prompt_tail_ids=ids[-_TAIL:], stop=tuple(params.stop)
                ),
                synthetic=self.config.speculative.rejection_sample_method == "synthetic",
            )
            for index in range(params.n)
        ]

    def _submit(self, requests: list[Request]) -> None:
        with self._lock:
            self._require_open()
            for request in requests:
                self._core.submit(request)

    def _advance(self, requests: list[Request]) -> None:
        """One step, if any of `requests` still needs one; a step that fails leaves the engine usable."""
        with self._lock:
            self._require_open()
            if all(r.result is not None for r in requests):
                return
            try:
                self._core.step()
            except Exception as error:
                # Whoever shares the round learns of it by their own results, and the engine stays usable.
                self._core.abort(f"a round failed: {type(error).__name__}: {error}")
                raise

    def _advance_until_done(self, requests: list[Request]) -> None:
        while any(r.result is None for r in requests):
            self._advance(requests)

    def _cancel(self, requests: list[Request]) -> None:
        with self._lock:
            if not self._closed:
                for request in requests:
                    self._core.cancel(request)

    def _require_open(self) -> None:
        if self._closed:
            raise DraftgraphError("the engine is closed")


def _as_tuple(buckets: Sequence[int] | None) -> tuple[int, ...] | None:
    if buckets is not None and not isinstance(buckets, Sequence):
        raise ConfigError(f"batch_buckets must be a list of integers or None, got {buckets!r}")
    return None if buckets is None else tuple(buckets)


def _checked(params: SamplingParams | None) -> SamplingParams:
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params must be a SamplingParams or None, got {params!r}")
    return params


def _answer(group: list[Request]) -> Answer:
    results = tuple(r.result for r in group if r.result is not None)
    return results[0] if len(group) == 1 else results
