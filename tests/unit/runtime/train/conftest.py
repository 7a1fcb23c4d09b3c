import pytest

from draftgraph.runtime.train.target_text import TargetText

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="session")
def plain_target(tiny_model_path):
    """The tiny model's, with its own template, which writes no token at the end of a turn."""
    return TargetText.of_directory(tiny_model_path)


@pytest.fixture
def target(tiny_model_path):
    """A fresh one, whose template ends every turn with the end token and a line break."""
    found = TargetText.of_directory(tiny_model_path)
    found.tokenizer.chat_template = CHATML
    return found
