"""A bench from its settings to its report: checks, loads, measures, lets go."""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...graphs import compile_region
from ...profiling.device_rates import load_rates
from ..cache import device_rates_directory
from ..doctor import package_version
from ..engine import Engine
from ..errors import DraftgraphError
from ..loading import check_target
from ..models import model_source, resolve_model
from ..progress import ProgressCallback
from ..speculative_config import SpeculativeConfig
from .engine_contender import EngineContender, LoadEngine, engine_method, engine_settings
from .journal import Journal
from .options import BenchOptions
from .peers import transformers_contenders
from .prompt_sets import load_prompt_set
from .records import Case, one_line
from .report import BenchReport, method_reports
from .runner import AbsentContender, Contender, make_groups, measure


@dataclass(frozen=True, kw_only=True)
class Bench:
    """A bench that can run: everything that needs no weights has been checked."""

    model: str
    path: Path
    options: BenchOptions
    engine_options: Mapping[str, Any]
    cases: tuple[Case, ...]
    assistant: Path | None

    @classmethod
    def prepare(
        cls, model: str, options: BenchOptions, engine_options: Mapping[str, Any], progress: ProgressCallback
    ) -> Bench:
        """Checks every method's settings against the model's config, and fetches what is missing.

        Args:
            model: as `Engine.from_pretrained` takes it.
            options: of the bench.
            engine_options: arguments of `Engine.from_pretrained` that all methods share.
            progress: told about downloads.

        Raises:
            DraftgraphError: something cannot be used; no weight has been read.
        """
        settings = [engine_settings(config, options, engine_options) for config in _configs(options)]
        path = resolve_model(model, progress=progress)
        for one in settings:
            check_target(path, one, progress)
        cases = [case for name in options.prompt_sets for case in load_prompt_set(name, options.limit, progress)]
        assistant = None if options.assistant is None else resolve_model(options.assistant, progress=progress)
        return cls(
            model=model,
            path=path,
            options=options,
            engine_options=engine_options,
            cases=tuple(cases),
            assistant=assistant,
        )

    def run(
        self,
        progress: ProgressCallback,
        load_engine: LoadEngine = Engine.from_pretrained,
        journal_file: Path | None = None,
    ) -> BenchReport:
        """Loads every method, measures them in turn, and reports. Ctrl-C while measuring gives a partial report.

        Args:
            progress: told about everything.
            load_engine: `Engine.from_pretrained`, or what stands for it.
            journal_file: keeps every pass as it ends, and what it holds of this very bench is not measured again.

        Raises:
            ConfigError: the journal is of another bench.
        """
        journal = None if journal_file is None else Journal.open(journal_file, self.identity)
        settings = engine_settings(None, self.options, self.engine_options)
        progress(0, 1, "measuring the device")
        rates = load_rates(device_rates_directory(), settings.torch_device, (settings.torch_dtype,))
        progress(1, 1, "measuring the device")
        _load_libraries(compiles=settings.compile)
        with contextlib.ExitStack() as stack:

            def load(config: SpeculativeConfig | None) -> EngineContender:
                one = EngineContender.load(load_engine, self.path, config, self.options, self.engine_options, progress)
                one.rates = rates
                stack.callback(one.close)
                return one

            plain = load(None)
            contenders: list[Contender] = [plain]
            for config in self.options.speculative:
                try:
                    contenders.append(load(config))
                except DraftgraphError:
                    raise  # a mistake in the settings, and not in what is measured
                except Exception as error:
                    method = engine_method(config, self.options.temperature)
                    contenders.append(AbsentContender(method, f"it could not be loaded: {one_line(error)}"))
            if self.options.peers:
                contenders += transformers_contenders(
                    self.path, self.assistant, self.options, settings.torch_dtype, settings.torch_device, progress
                )
            groups = make_groups(self.cases, plain.encode, self.options)
            measured = measure(contenders, groups, self.options.load, progress, journal)
            memory = {one.method.name: (one.memory.held, one.memory.peak) for one in contenders}
            methods = [one.method for one in contenders]
        dtype = str(settings.torch_dtype).removeprefix("torch.")
        return BenchReport(
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            partial=measured.partial,
            settings={
                "model": self.model,
                "source": model_source(self.path),
                **self.options.to_dict(),
                **self.engine_options,
                "dtype": dtype,
                "device": str(settings.torch_device),
            },
            machine={
                "device_name": rates.device,
                "threads": rates.threads,
                "bandwidth_gigabytes_per_second": round(rates.bandwidth / 1e9, 1),
                "torch": torch.__version__,
                "transformers": package_version("transformers"),
                "draftgraph": package_version("draftgraph"),
            },
            rounding_may_differ=settings.torch_dtype != torch.float32 and not settings.exact,
            methods=method_reports(methods, measured, memory),
        )

    @property
    def identity(self) -> dict[str, Any]:
        """What two benches share whose measurements can be put together, in types that JSON has."""
        asked = json.dumps([[case.prompt_set, case.name, case.prompt] for case in self.cases])
        return {
            "model": model_source(self.path),
            **self.options.to_dict(),
            **{name: value if value is None else str(value) for name, value in self.engine_options.items()},
            "prompts": hashlib.sha256(asked.encode()).hexdigest(),
            "threads": torch.get_num_threads(),
        }


def _configs(options: BenchOptions) -> tuple[SpeculativeConfig | None, ...]:
    """Plain decoding first, which the others are compared with."""
    return (None, *options.speculative)


def _load_libraries(*, compiles: bool) -> None:
    """Imports what is imported once in a process, lest its memory be charged to the method that comes first."""
    from transformers import AutoTokenizer  # noqa: F401

    if compiles:
        compile_region(torch.relu)(torch.ones(4))
