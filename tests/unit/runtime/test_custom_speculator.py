"""A drafting method of the user's: by import path or entry point, checked before any weight is read."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest

from draftgraph import Engine, SamplingParams
from draftgraph.runtime import loading
from draftgraph.runtime.errors import ConfigError
from draftgraph.runtime.speculators import custom

ROOT = Path(__file__).parents[3]
TEXTS = ["a", "one two three, one two three, one", "The steam engine"]


def own(path: str, depth: int = 4, **options: object) -> dict[str, object]:
    return {"method": "custom", "speculator": path, "num_speculative_tokens": depth, **options}


def load(path, spec=None, **options: object) -> Engine:
    settings: dict = {"dtype": "float32", "compile": False, "max_batch_size": 2, "max_model_len": 256}
    return Engine.from_pretrained(path, spec, **{**settings, **options})


@pytest.fixture(scope="module")
def wanted(tiny_model_path):
    """The token ids of plain decoding."""
    with load(tiny_model_path) as engine:
        return [r.token_ids for r in engine.generate(TEXTS, SamplingParams(max_tokens=40))]


def check(tiny_model_path, spec, wanted) -> None:
    with load(tiny_model_path, spec) as engine:
        results = engine.generate(TEXTS, SamplingParams(max_tokens=40))
    assert [r.token_ids for r in results] == wanted
    assert sum(r.metrics.accepted_tokens for r in results) > 0


@pytest.mark.parametrize("depth", [1, 4, 8])
def test_by_import_path(tiny_model_path, wanted, depth):
    check(tiny_model_path, own("small_speculators:Successor", depth), wanted)


@pytest.mark.parametrize("method", ["custom", ["ngram", "custom"]])
def test_drafts_that_are_no_tokens_are_no_proposals(tiny_model_path, wanted, method):
    with load(tiny_model_path, own("small_speculators:OutOfTheVocabulary") | {"method": method}) as engine:
        results = engine.generate(TEXTS, SamplingParams(max_tokens=40))
    assert [r.token_ids for r in results] == wanted


def test_the_example_of_the_readme(tiny_model_path, wanted, tmp_path, monkeypatch):
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), flags=re.MULTILINE | re.DOTALL)
    [source] = [block for block in blocks if "(BaseSpeculator)" in block]
    assert source.count("\n") <= 36
    (tmp_path / "bigram.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    check(tiny_model_path, own("bigram:BigramSpeculator"), wanted)


def test_by_entry_point(tiny_model_path, wanted, monkeypatch):
    def installed(*, group: str) -> importlib.metadata.EntryPoints:
        assert group == "draftgraph.speculators"
        named = {"successor": "small_speculators:Successor", "broken": "small_speculators:Nothing"}
        return importlib.metadata.EntryPoints(
            importlib.metadata.EntryPoint(name, value, group) for name, value in named.items()
        )

    monkeypatch.setattr(custom, "entry_points", installed)
    check(tiny_model_path, own("successor"), wanted)
    with pytest.raises(ConfigError, match=r"'broken', an entry point, does not import: .*Nothing"):
        load(tiny_model_path, own("broken"))
    with pytest.raises(ConfigError, match=r"'other' is neither .* nor an entry point .*\(broken, successor\)"):
        load(tiny_model_path, own("other"))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_module:Drafter", r"'no_such_module:Drafter' does not import: ModuleNotFoundError.*PYTHONPATH=\."),
        ("small_speculators:Nothing", r"'small_speculators:Nothing' does not import: the module .* has no 'Nothing'"),
        ("small_speculators:", r"'small_speculators:' does not import"),
        (":Drafter", r"':Drafter' does not import"),
        ("drafter", r"'drafter' is neither 'package.module:Class' nor an entry point .*draftgraph.speculators"),
        ("small_speculators:NotOne", r"'small_speculators:NotOne' is .*; accepted: a subclass of .*BaseSpeculator"),
        ("small_speculators:function", r"'small_speculators:function' is .*; accepted: a subclass"),
        ("small_speculators:Half", r"'small_speculators:Half' does not define propose"),
        ("small_speculators:CannotBeMade", r"cannot be made with num_speculative_tokens = 4: .*'table'"),
        ("small_speculators:AllocatesByValue", r"cannot be allocated on fake CUDA tensors"),
        ("small_speculators:ReadsTheHost", r"ReadsTheHost': step 'propose\[1\]' cannot be captured: .*reads a value"),
        ("small_speculators:CommitsOnTheHost", r"step 'commit\[1\]' cannot be captured"),
        ("small_speculators:VerifiesOnTheHost", r"step 'verify_hidden' cannot be captured: .*reads a value"),
        ("small_speculators:ObservesOnTheHost", r"step 'observe_prompt' cannot be captured"),
        ("small_speculators:ReadsNoSuchState", r"hidden states \[0, 99\]; accepted: 0 to \d+"),
        ("small_speculators:BeginsNowhere", r"has first_layer 99; accepted: 0 to \d+"),
        ("small_speculators:PrefillsOnTheHost", r"step 'prefill' cannot be captured: .*copies between cpu and cuda"),
    ],
)
def test_refused_before_weights_are_read(tiny_model_path, monkeypatch, path, message):
    monkeypatch.setattr(loading, "load_model", lambda *a, **k: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match=message) as caught:
        load(tiny_model_path, own(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"method": "custom", "num_speculative_tokens": 4}, "method 'custom' needs speculator, the class that drafts"),
        ({"method": "ngram", "num_speculative_tokens": 4, "speculator": "a:B"}, "speculator needs method 'custom'"),
        (own("a:B") | {"speculator": 3}, "speculator must be a non-empty string or None, got 3"),
        ({"method": "custom", "speculator": "a:B"}, "needs num_speculative_tokens"),
    ],
)
def test_contradictions(tiny_model_path, spec, message):
    with pytest.raises(ConfigError, match=message):
        load(tiny_model_path, spec)
