import functools

import pytest

from draftgraph import Engine
from draftgraph.profiling.device_rates import DeviceRates
from draftgraph.runtime.bench import engine_contender, session
from draftgraph.runtime.bench.options import BenchOptions
from draftgraph.runtime.bench.session import Bench
from draftgraph.runtime.speculative_config import SpeculativeConfig

ENGINE_OPTIONS = {
    "dtype": "float32",
    "device": "cpu",
    "max_model_len": 512,
    "exact": False,
    "compile": False,
    "executor": "host",
}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1)
RATES = {
    "device": "a test's device",
    "threads": 1,
    "torch_version": "0",
    "copy_bandwidth": 1e10,
    "read_bandwidth": 2e10,
    "matmul": {"float32": 1e11},
}


@pytest.fixture
def known_device(monkeypatch):
    """The device's rates are given, and garbage stays: measuring and collecting take longer than the tests."""
    monkeypatch.setattr(engine_contender.gc, "collect", lambda: 0)
    monkeypatch.setattr(session, "load_rates", lambda *_: DeviceRates(**RATES))


@pytest.fixture
def run_bench(tiny_model_path, known_device):
    """Runs a bench on the tiny model; settings as `BenchOptions`, short answers by default."""

    def run(load_engine=Engine.from_pretrained, progress=lambda *_: None, engine_options=None, **options):
        settings = {"speculative": (NGRAM,), "prompt_sets": ("echo",), "limit": 2, "max_tokens": 12, "repeats": 1}
        prepared = Bench.prepare(
            str(tiny_model_path),
            BenchOptions(**{**settings, **options}),
            {**ENGINE_OPTIONS, **(engine_options or {})},
            progress,
        )
        return prepared.run(progress, load_engine)

    return run


@pytest.fixture
def failing_engine():
    """Makes a loader whose speculative engine does what it is told in place of a round, from some round on."""

    def make(action, after=0, only_speculative=True):
        rounds = [0]

        def load(model, config, **options):
            engine = Engine.from_pretrained(model, config, **options)
            if config is not None or not only_speculative:
                step = engine._core._round

                def broken():
                    rounds[0] += 1
                    if rounds[0] > after:
                        action()
                    step()

                engine._core._round = broken
            return engine

        return functools.wraps(Engine.from_pretrained)(load)

    return make
