"""transformers as a contender: the same prompts through its `generate`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from ...profiling.memory import MemoryAccount
from ..progress import ProgressCallback
from .options import BenchOptions, Load
from .records import Answer, Job, Method, StepReport, one_line, refused
from .runner import AbsentContender, Contender


class TransformersModel:
    """A model in transformers, loaded once for all of its contenders."""

    def __init__(self, path: Path, dtype: torch.dtype, device: torch.device, progress: ProgressCallback) -> None:
        """Loads it; `path` is a local directory."""
        from transformers import AutoModelForCausalLM

        self.device = device
        self.memory = MemoryAccount(device)
        progress(0, 1, "loading transformers")
        with self.memory.watch():
            model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
            self.model: Any = model.to(device).eval()
            # Weights may be mapped from their file: what is not read yet would be charged to the first to use it.
            for weights in self.model.parameters():
                weights.detach().sum()
        progress(1, 1, "loading transformers")
        self.eos_token_ids = _as_list(self.model.generation_config.eos_token_id)


class TransformersContender:
    """One way of calling `generate`: plain, with prompt lookup, or with an assistant model.

    Greedy or sampled at the given temperature without other filters, as our engine. It answers one prompt at a time.
    """

    def __init__(
        self,
        method: Method,
        target: TransformersModel,
        options: BenchOptions,
        assistant: TransformersModel | None = None,
    ) -> None:
        """`method.config` holds further arguments of `generate`."""
        self.method, self.target, self._options = method, target, options
        self._extra = dict(method.config)
        if assistant is not None:
            self._extra["assistant_model"] = assistant.model
        held = sum(one.memory.held or 0 for one in (target, assistant) if one is not None)
        self.memory = MemoryAccount(target.device, held)

    def replay(self, groups: Sequence[Sequence[Job]], load: Load) -> StepReport | None:
        """Answers the first group to warm up; transformers' steps are not told apart."""
        for jobs in groups[:1]:
            list(self.answer(jobs, load))
        return None

    def answer(self, jobs: Sequence[Job], load: Load) -> Iterator[Answer]:
        """Answers one prompt after another."""
        for job in jobs:
            if job.error is not None:
                yield refused(job, job.error)
                continue
            try:
                yield self._answer(job)
            except Exception as error:
                yield refused(job, one_line(error))

    def _answer(self, job: Job) -> Answer:
        params = self._options.sampling(job.seed)
        prompt = torch.tensor([job.prompt_ids], device=self.target.device)
        watch = _Watch(self._options.timeout)
        hook = self.target.model.register_forward_pre_hook(watch.count_pass)
        # transformers draws from torch's generator.
        torch.manual_seed(params.seed or 0)
        choice: dict[str, Any] = {"do_sample": False}
        if not params.greedy:
            choice = {"do_sample": True, "temperature": params.temperature, "top_k": 0, "top_p": 1.0}
        started = time.perf_counter()
        watch.started = started
        try:
            with torch.inference_mode():
                out = self.target.model.generate(
                    prompt,
                    attention_mask=torch.ones_like(prompt),
                    max_new_tokens=params.max_tokens,
                    eos_token_id=None if params.ignore_eos else self.target.eos_token_ids,
                    pad_token_id=(self.target.eos_token_ids or [0])[0],
                    repetition_penalty=1.0,  # which some models' own settings change
                    **choice,
                    streamer=watch,
                    stopping_criteria=[watch.is_late],
                    **self._extra,
                )
        finally:
            hook.remove()
        latency = time.perf_counter() - started
        tokens = tuple(out[0, len(job.prompt_ids) :].tolist())
        return Answer(
            prompt_set=job.case.prompt_set,
            prompt=job.case.name,
            repeat=job.repeat,
            status="timeout" if watch.late else "ok",
            error=f"cut off after {latency:.1f} s with {len(tokens)} tokens" if watch.late else None,
            finish_reason=self._reason(tokens, watch.late, params.ignore_eos),
            prompt_tokens=len(job.prompt_ids),
            token_ids=tokens,
            bursts=tuple(watch.bursts),
            latency=latency,
            rounds=watch.passes,
        )

    def _reason(self, tokens: tuple[int, ...], late: bool, ignore_eos: bool) -> str:
        if late:
            return "cancelled"
        return "stop" if not ignore_eos and tokens and tokens[-1] in self.target.eos_token_ids else "length"


class _Watch:
    """Notes when tokens arrive, as a streamer; counts passes of the target; ends what takes too long."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._prompt_seen = False
        self.started = 0.0
        self.bursts: list[tuple[float, int]] = []
        self.passes = 0
        self.late = False

    def put(self, tokens: torch.Tensor) -> None:
        """Takes the prompt first, then the tokens of each step."""
        if not self._prompt_seen:
            self._prompt_seen = True
        elif tokens.numel():
            self.bursts.append((time.perf_counter() - self.started, tokens.numel()))

    def end(self) -> None:
        """Nothing is left to take."""

    def count_pass(self, *_: object) -> None:
        """Called before each forward pass of the target."""
        self.passes += 1

    def is_late(self, input_ids: torch.Tensor, scores: Any, **_: object) -> torch.Tensor:
        """The stopping criterion: true for every row once the time is over."""
        self.late = time.perf_counter() - self.started > self._timeout
        return torch.full((input_ids.shape[0],), self.late, dtype=torch.bool, device=input_ids.device)


def transformers_contenders(
    path: Path,
    assistant: Path | None,
    options: BenchOptions,
    dtype: torch.dtype,
    device: torch.device,
    progress: ProgressCallback,
) -> list[Contender]:
    """Plain, prompt lookup as each of our configs looks up, and the assistant if there is one.

    Where transformers cannot load the model, they are there all the same, and their answers say why.
    """
    methods = [_method("plain", 0, {})]
    for config in options.speculative:
        depth, longest = config.num_speculative_tokens, config.prompt_lookup_max
        if depth is not None and longest is not None:  # it looks drafts up in the prompt
            one = _method("lookup", depth, {"prompt_lookup_num_tokens": depth, "max_matching_ngram_size": longest})
            if one.name not in [other.name for other in methods]:
                methods.append(one)
    assisted = _method("assistant", None, {})
    try:
        target = TransformersModel(path, dtype, device, progress)
    except Exception as error:
        absent = [*methods, *([assisted] if assistant is not None else [])]
        return [AbsentContender(method, one_line(error)) for method in absent]
    found: list[Contender] = [TransformersContender(method, target, options) for method in methods]
    if assistant is not None:
        try:
            helper = TransformersModel(assistant, dtype, device, progress)
        except Exception as error:
            found.append(AbsentContender(assisted, one_line(error)))
        else:
            found.append(TransformersContender(assisted, target, options, helper))
    return found


def _method(way: str, depth: int | None, extra: dict[str, Any]) -> Method:
    family = f"transformers {way}"
    return Method(
        name=f"{family} K={depth}" if depth else family,
        engine="transformers",
        family=family,
        depth=depth,
        config=extra,
    )


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [int(token) for token in value] if isinstance(value, (list, tuple)) else [int(value)]
