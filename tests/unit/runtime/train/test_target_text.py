import pytest

from draftgraph.runtime.errors import RequestError
from draftgraph.runtime.train.self_made import user_turn
from draftgraph.runtime.train.target_text import TargetText

USER, HELLO, AGAIN = (
    {"role": role, "content": text} for role, text in (("user", "a b"), ("assistant", "one two"), ("user", "c"))
)


def read(target, example):
    """The text of an example, with its answers in brackets."""
    pieces, place = [], 0
    for start, end in example.answer:
        pieces += [target.tokenizer.decode(example.tokens[place:start])]
        pieces += ["[", target.tokenizer.decode(example.tokens[start:end]), "]"]
        place = end
    return "".join([*pieces, target.tokenizer.decode(example.tokens[place:])])


def test_what_a_directory_says(plain_target):
    assert plain_target.end_ids == (0,)
    assert plain_target.vocab_size == len(plain_target.tokenizer)
    assert plain_target.has_chat_template
    assert plain_target.text_start() == ()


def test_the_beginning_of_texts(target):
    from tokenizers.processors import TemplateProcessing

    target.tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A", special_tokens=[("<eos>", 0)]
    )
    target.tokenizer.bos_token = "<eos>"
    assert target.text_start() == (0,)


def test_an_answer_ends_with_the_token_that_ends_a_turn(target):
    example = target.chat([USER, HELLO])
    assert read(target, example) == "<|user|>a b<eos>\n<|assistant|>[one two<eos>]"
    assert example == target.answered([USER], "one two")
    assert example.prompt == target.encode_prompt([USER])


def test_a_template_without_such_a_token(plain_target):
    example = plain_target.chat([USER, HELLO])
    assert read(plain_target, example) == "<|user|>a b\n<|assistant|>[one two\n]"


def test_a_tokenizer_that_puts_a_space_before_every_text(target):
    from tokenizers.pre_tokenizers import ByteLevel

    target.tokenizer.backend_tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=True)
    target.tokenizer.chat_template = target.tokenizer.chat_template.replace("<|", " ").replace("|>", ":")
    example = target.chat([USER, HELLO, AGAIN, HELLO])
    # None before an answer, where the whole chat has none either.
    text = " user:a b<eos> \n assistant:[one two<eos>] \n user:c<eos> \n assistant:[one two<eos>]"
    assert read(target, example) == text
    assert read(target, target.answered("a b", ", c")) == " a b[, c<eos>]"


def test_several_turns(target):
    example = target.chat([USER, HELLO, AGAIN, HELLO, AGAIN])
    assert read(target, example) == (
        "<|user|>a b<eos>\n<|assistant|>[one two<eos>]\n<|user|>c<eos>\n<|assistant|>[one two<eos>]"
    )


def test_text_that_is_gone_on_with(target):
    assert read(target, target.answered("a b", " c")) == "a b[ c<eos>]"
    assert read(target, target.answered([5, 6], " c")).endswith("[ c<eos>]")


def test_a_template_that_forgets_earlier_turns_is_followed_as_far_as_it_goes(target):
    target.tokenizer.chat_template = target.tokenizer.chat_template.replace(
        "{{ m['content'] }}", "{% if m['role'] == 'user' or loop.last %}{{ m['content'] }}{% endif %}"
    )
    example = target.chat([USER, HELLO, AGAIN, HELLO])
    assert read(target, example) == "<|user|>a b<eos>\n<|assistant|>[one two<eos>]"


def test_a_template_that_begins_otherwise_than_it_goes_on(target):
    target.tokenizer.chat_template += "{% if add_generation_prompt %}<think>{% endif %}"
    with pytest.raises(RequestError, match="cannot be told which tokens are the answer"):
        target.chat([USER, HELLO])


@pytest.mark.parametrize("messages", [[USER], [HELLO], [HELLO, USER, HELLO]])
def test_chats_without_an_answer(target, messages):
    with pytest.raises(RequestError, match="a turn of the assistant, after one of the user"):
        target.chat(messages)


def test_malformed_messages(target):
    with pytest.raises(RequestError, match="chat message 1 must have a 'role' and a 'content'"):
        target.chat([USER, {"role": "assistant"}])


@pytest.mark.models
def test_a_real_template(smollm2_path):
    smollm2 = TargetText.of_directory(smollm2_path)
    turn = user_turn(smollm2.tokenizer)
    assert turn.before.endswith("<|im_start|>user\n")
    assert turn.after == "<|im_end|>\n<|im_start|>assistant\n"
    example = smollm2.chat([USER, HELLO])
    assert read(smollm2, example) == f"{turn.before}a b{turn.after}[one two<|im_end|>]"
