import functools
import re
from pathlib import Path

import pytest

from draftgraph import Engine

ROOT = Path(__file__).parents[3]
DOCUMENTS = ("README.md", "CONTRIBUTING.md", "profiling/README.md")


def python_blocks():
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL):
            line = text[: match.start()].count("\n") + 2
            marks = [pytest.mark.models] if "from_pretrained" in match[1] else []
            yield pytest.param(document, line, match[1], id=f"{document}:{line}", marks=marks)


@pytest.mark.parametrize(("document", "line", "source"), list(python_blocks()))
def test_examples_run(document, line, source, monkeypatch, capsys):
    # Compiling takes longer than the examples, and changes nothing about them.
    eager = functools.partial(Engine.from_pretrained, compile=False)
    monkeypatch.setattr(Engine, "from_pretrained", eager)
    code = compile("\n" * (line - 1) + source, str(ROOT / document), "exec")
    exec(code, {"__name__": "example"})
    if "print(" in source:
        assert capsys.readouterr().out.strip()


def test_both_documents_have_examples():
    found = [parameter.values[0] for parameter in python_blocks()]
    assert found.count("README.md") >= 2
    assert found.count("CONTRIBUTING.md") >= 1


def test_the_two_commands():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\npip install -e . && draftgraph demo\n" in text
    assert "\npip install -e '.[test]' && pytest -n auto --dist worksteal\n" in text


def test_the_option_tables_are_complete():
    import inspect

    from draftgraph import SamplingParams

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    options = list(inspect.signature(Engine.from_pretrained).parameters)[2:]
    for name in (*options, *SamplingParams.__dataclass_fields__):
        if name not in ("progress", "attention_backend"):
            assert f"`{name}`" in text, name


def test_links_lead_somewhere():
    for document in DOCUMENTS:
        text = (ROOT / document).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (ROOT / target).exists(), f"{document} links to {target}"
