"""Our engine with one speculative config, as a contender."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...profiling.device_rates import DeviceRates
from ...profiling.memory import MemoryAccount
from ...profiling.step_timer import StepTimer
from ..engine import Engine
from ..engine_config import EngineConfig
from ..errors import DraftgraphError
from ..progress import ProgressCallback
from ..speculative_config import SpeculativeConfig
from ..verification import repeats_plain_text
from .load_driver import drive
from .options import BenchOptions, Load, method_label
from .records import Answer, Case, Job, Method, StepReport
from .step_reports import step_report

PLAIN, OURS = "plain", "draftgraph"
_WARM_UP_TOKENS = 8

LoadEngine = Callable[..., Engine]
"""`Engine.from_pretrained`, or what stands for it."""


class EngineContender:
    """An engine, loaded and warmed up.

    Prefix caching is off: a prompt that comes again would otherwise skip its prefill.
    """

    def __init__(self, engine: Engine, method: Method, options: BenchOptions, memory: MemoryAccount) -> None:
        """Use `load` instead."""
        self.engine, self.method, self.memory, self._options = engine, method, memory, options
        self.rates: DeviceRates | None = None
        """Of the device, if the floor is wanted."""

    @classmethod
    def load(
        cls,
        load_engine: LoadEngine,
        model: Any,
        config: SpeculativeConfig | None,
        options: BenchOptions,
        engine_options: Mapping[str, Any],
        progress: ProgressCallback,
    ) -> EngineContender:
        """Loads an engine for `config`; None decodes plainly."""
        method = engine_method(config, options.temperature)
        settings = engine_settings(config, options, engine_options)
        memory = MemoryAccount(settings.torch_device)
        with memory.watch():
            progress(0, 1, f"loading {method.name}")
            engine = load_engine(
                model,
                config,
                **engine_options,
                max_batch_size=settings.max_batch_size,
                metrics=settings.metrics,
                prefix_caching=settings.prefix_caching,
                progress=lambda done, total, _: progress(done, total, f"loading {method.name}"),
            )
            try:
                engine.warmup(lambda done, total, _: progress(done, total, f"compiling {method.name}"))
            except BaseException:
                engine.close()
                raise
            gc.collect()
        return cls(engine, method, options, memory)

    def encode(self, case: Case) -> tuple[tuple[int, ...], str | None]:
        """The token ids of a prompt, or none and why it cannot be asked."""
        has_template = bool(getattr(self.engine.tokenizer, "chat_template", None))
        try:
            return self.engine.encode(case.prompt if has_template else _as_text(case.prompt)), None
        except DraftgraphError as error:
            return (), str(error)

    def replay(self, groups: Sequence[Sequence[Job]], load: Load) -> StepReport | None:
        """Answers the groups under a step timer, after the beginning of the first one without."""
        timer = StepTimer(self.engine.config.torch_device, keep_events=True)
        short = dataclasses.replace(self._options, max_tokens=min(_WARM_UP_TOKENS, self._options.max_tokens))
        for jobs in groups[:1]:
            list(drive(self.engine, jobs, load, short))
        with self.engine.observe(timer):
            answers = [answer for jobs in groups for answer in drive(self.engine, jobs, load, self._options)]
        return step_report(self.engine, timer, answers, self.rates)

    def answer(self, jobs: Sequence[Job], load: Load) -> Iterator[Answer]:
        """Answers all jobs; see `drive`."""
        return drive(self.engine, jobs, load, self._options)

    def close(self) -> None:
        """Lets go of the engine."""
        self.engine.close()


def engine_settings(
    config: SpeculativeConfig | None, options: BenchOptions, engine_options: Mapping[str, Any]
) -> EngineConfig:
    """The settings of a contender's engine, checked without loading anything.

    Raises:
        DraftgraphError: an engine option that cannot be used.
    """
    return EngineConfig(
        speculative=SpeculativeConfig.parse(config),
        max_batch_size=options.load.concurrency,
        metrics="summary",
        prefix_caching=False,
        **engine_options,
    )


def engine_method(config: SpeculativeConfig | None, temperature: float) -> Method:
    """What an engine with `config` is called; None is plain decoding."""
    if config is None:
        plain = SpeculativeConfig()
        return Method(name=PLAIN, engine=OURS, family=PLAIN, depth=0, config=plain.to_dict(), repeats_plain_text=True)
    depth = config.num_speculative_tokens
    name = method_label(config)
    return Method(
        name=name,
        engine=OURS,
        family=name.replace(f" K={depth}", ""),
        depth=depth,
        config=config.to_dict(),
        repeats_plain_text=repeats_plain_text(config, temperature),
    )


def _as_text(prompt: Any) -> Any:
    """A chat as text to go on from, for a model without a chat template; any other prompt as it is."""
    if isinstance(prompt, str) or not isinstance(prompt[0], Mapping):
        return prompt
    return "\n\n".join(str(message["content"]) for message in prompt) + "\n\n"
