"""The target's own answers and prompts, by a tiny random target."""

import dataclasses
import io
import itertools
import json

import pytest
from rich.console import Console

from draftgraph import Engine, SamplingParams
from draftgraph.model_zoo.training.examples import Example
from draftgraph.runtime.errors import ConfigError, DraftgraphError, RequestError
from draftgraph.runtime.train.answering_progress import answering_progress, duration
from draftgraph.runtime.train.many_requests import answers_as_done, answers_in_order
from draftgraph.runtime.train.regenerate import Answering, AnswerSettings, answer_prompts
from draftgraph.runtime.train.self_made import SelfMadeSettings, UserTurn, _end_of_turn, self_made_prompts, user_turn
from draftgraph.runtime.train.sources import load_examples

SETTINGS = AnswerSettings(max_length=40, max_tokens=12)
PROMPTS = ((36,), (38,), *(tuple(range(n + 5, n + 9)) for n in range(0, 63, 7)), tuple(range(30, 68)))


def ignore(state):
    pass


def no_engine():
    raise AssertionError("an engine was asked for")


def answer(engine, file, prompts=PROMPTS, settings=SETTINGS, progress=ignore, target="tiny"):
    return answer_prompts(lambda: engine, prompts, file, settings, progress, made_by={"target": target})


@pytest.fixture(scope="module")
def engine(tiny_model_path):
    options = {"dtype": "float32", "compile": False, "max_batch_size": 8, "batch_buckets": [8], "max_model_len": 128}
    with Engine.from_pretrained(tiny_model_path, **options) as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine):
    results = [
        engine.generate(list(prompt), SamplingParams(max_tokens=min(12, 40 - len(prompt)))) for prompt in PROMPTS
    ]
    return tuple(Example.answered(r.prompt_token_ids, r.token_ids) for r in results)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "answers.jsonl"


def test_many_requests(engine):
    requests = [([n + 5], SamplingParams(max_tokens=3 + n % 4, temperature=1.0, seed=n, n=1 + n % 3)) for n in range(9)]
    alone = [engine.generate(prompt, params) for prompt, params in requests]
    alone = [tuple(r.token_ids for r in (a if isinstance(a, tuple) else (a,))) for a in alone]
    assert [tuple(r.token_ids for r in group) for group in answers_in_order(engine, requests)] == alone
    done = {number: tuple(r.token_ids for r in group) for number, group in answers_as_done(engine, requests)}
    assert done == dict(enumerate(alone))
    assert list(answers_in_order(engine, [])) == []


def test_requests_without_end_are_taken_as_there_is_room(engine):
    taken = itertools.count()
    requests = (([next(taken) % 50 + 5], SamplingParams(max_tokens=2)) for _ in itertools.count())
    assert len(list(itertools.islice(answers_in_order(engine, requests), 5))) == 5
    assert next(taken) <= 2 * 8 + 5
    assert not engine._core.busy


def test_a_request_that_is_refused_leaves_the_engine_free(engine):
    requests = [([5], SamplingParams()), ([10**6], SamplingParams())]
    with pytest.raises(RequestError, match="outside the vocabulary"):
        list(answers_in_order(engine, requests))
    assert not engine._core.busy


def test_answers_are_the_engines_and_can_be_read_as_data(engine, file, expected, plain_target):
    states = []
    found = answer(engine, file, progress=states.append)
    assert found == expected
    assert [state.done for state in states] == list(range(1, len(PROMPTS) + 1))
    assert states[-1].tokens == sum(len(e.answer_tokens()) for e in expected)
    assert states[-1].seconds_left == 0
    finishes = {json.loads(line).get("finish") for line in file.read_text().splitlines()}
    assert finishes == {None, "stop", "length"}
    read = load_examples(str(file), plain_target, 40, lambda *_: None)
    assert set(read.items) == set(expected)


def test_it_goes_on_where_it_stopped(engine, file, expected):
    class Killed(Exception):
        pass

    def kill(state):
        if state.done == 5:
            raise Killed

    with pytest.raises(Killed):
        answer(engine, file, progress=kill)
    lines = file.read_bytes().splitlines(keepends=True)
    assert len(lines) == 6
    file.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])
    states = []
    assert answer(engine, file, progress=states.append) == expected
    assert len(states) == len(PROMPTS) - 4
    assert states[0].done == 5
    # Nothing is left to be answered, so that no engine is needed.
    assert answer_prompts(no_engine, PROMPTS, file, SETTINGS, ignore, made_by={"target": "tiny"}) == expected


def test_more_and_fewer_prompts(engine, file, expected):
    assert answer(engine, file, PROMPTS[:3]) == expected[:3]
    assert answer(engine, file) == expected
    assert answer(engine, file, PROMPTS[:2]) == expected[:2]


def test_answers_of_something_else_are_refused(engine, file):
    answer(engine, file, PROMPTS[:2])
    with pytest.raises(ConfigError, match='target is "tiny" there and "other" now'):
        answer(engine, file, target="other")
    with pytest.raises(ConfigError, match="max_tokens is 12 there and 13 now"):
        answer(engine, file, settings=AnswerSettings(max_length=40, max_tokens=13))
    with pytest.raises(ConfigError, match=r"the answer to prompt 0 in .* is to another prompt"):
        answer(engine, file, PROMPTS[1:])


def test_a_damaged_answer(engine, file):
    answer(engine, file, PROMPTS[:2])
    file.write_text(file.read_text().replace('"number"', '"nummer"', 1))
    with pytest.raises(ConfigError, match=r"are damaged at .*nummer"):
        answer(engine, file, PROMPTS[:2])


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ((), "of at most 39 tokens are needed to be answered; there is none"),
        (((5,), (5,) * 40), "prompt 1 has 40 tokens"),
    ],
)
def test_prompts_that_cannot_be_answered(engine, file, prompts, message):
    with pytest.raises(ConfigError, match=message):
        answer(engine, file, prompts)
    assert not file.exists()


def test_answers_that_are_not_finite_are_left_out(engine, file, expected):
    answer(engine, file, PROMPTS[:2])
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for count in (1, 2):
        for line in lines[1 : 1 + count]:
            line.update(finish="error", token_ids=[])
        file.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if count == 1:
            assert answer(engine, file, PROMPTS[:2]) == tuple(
                e for n, e in enumerate(expected[:2]) if n != lines[1]["number"]
            )
    with pytest.raises(DraftgraphError, match="answered none of 2 prompts: its logits are not finite"):
        answer(engine, file, PROMPTS[:2])


def test_settings_that_are_refused():
    with pytest.raises(ConfigError, match="max_length must be at least 2, got 1"):
        AnswerSettings(max_length=1)
    with pytest.raises(RequestError, match="temperature"):
        AnswerSettings(max_length=8, temperature=-1)
    with pytest.raises(RequestError, match="top_p"):
        SelfMadeSettings(top_p=0)
    with pytest.raises(ConfigError, match="openings must be a list of texts that is not empty"):
        SelfMadeSettings(openings=())


def test_what_is_shown_of_the_answering():
    assert (duration(59.6), duration(3723)) == ("1:00", "1:02:03")
    for terminal in (False, True):
        out = io.StringIO()
        with answering_progress(Console(file=out, force_terminal=terminal, width=120)) as show:
            show(Answering(done=6, total=10, tokens=300, seconds=3.0, answered=1))
            show(Answering(done=10, total=10, tokens=900, seconds=6.0, answered=5))
        assert "10 of 10 prompts, 150 tokens/s, 0:00 left" in out.getvalue()
        if not terminal:
            assert out.getvalue().splitlines()[0] == "answering: 6 of 10 prompts, 100 tokens/s, 0:12 left"


MADE = SelfMadeSettings(openings=("", "def"), samples=16, max_tokens=30, temperature=2.0, seed=3)


def make(engine, count, file, settings=MADE, progress=lambda *_: None):
    made_by = {"target": "tiny"}
    return self_made_prompts(lambda: engine, engine.tokenizer, count, file, progress, settings, made_by=made_by)


def test_where_a_users_words_begin(plain_target, target):
    turn = user_turn(plain_target.tokenizer)
    assert (turn.before, turn.after) == ("<|user|>", "\n<|assistant|>")
    assert user_turn(target.tokenizer).after == "<eos>\n<|assistant|>"


@pytest.mark.parametrize(
    ("after", "end"),
    [
        ("<eos>\n<|assistant|>", {"stop_token_ids": (0,)}),
        (" text\n<|assistant|>", {"stop_token_ids": (2,)}),
        ("\n[/INST] ", {"stop": ("[/INST]",)}),
        (" ", {}),
    ],
)
def test_what_ends_a_users_turn(plain_target, after, end):
    assert _end_of_turn(plain_target.tokenizer, UserTurn(before="<|user|>", after=after)) == end


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "only by a target with a chat template"),
        ("{{ raise_exception('no users') }}", "only by a target with a chat template: .*no users"),
        ("{{ messages[0]['content'] }}<|assistant|>", "does not write a user's words once, after something"),
        ("<|user|>{% for m in messages %}{{ m['content'] }}{{ m['content'] }}{% endfor %}", "it makes '<|user|>"),
        ("<|user|>hello", "cannot make up prompts"),
    ],
)
def test_targets_that_cannot_make_up_prompts(target, template, message):
    target.tokenizer.chat_template = template
    with pytest.raises(ConfigError, match=message):
        user_turn(target.tokenizer)


def test_prompts_that_the_target_makes_up(engine, tmp_path):
    seen = []
    made = make(engine, 4, tmp_path / "a.jsonl", progress=lambda done, total, what: seen.append((done, total, what)))
    assert len({prompt.lower() for prompt in made}) == 4
    assert all(len(prompt) > 10 and prompt == prompt.strip() for prompt in made)
    assert any(prompt.startswith("def") for prompt in made)
    assert seen[-1] == (4, 4, "making up prompts")
    tokenizer, made_by = engine.tokenizer, {"target": "tiny"}
    assert self_made_prompts(no_engine, tokenizer, 2, tmp_path / "a.jsonl", ignore, MADE, made_by=made_by) == made[:2]
    # The same again, and stopped on the way.
    make(engine, 1, tmp_path / "b.jsonl")
    assert make(engine, 4, tmp_path / "b.jsonl") == made
    with pytest.raises(ConfigError, match="seed is 3 there and 4 now"):
        make(engine, 2, tmp_path / "a.jsonl", dataclasses.replace(MADE, seed=4))


def test_a_target_that_has_nothing_more_to_say(engine, tmp_path):
    dull = SelfMadeSettings(openings=("one two three",), samples=2, max_tokens=30, temperature=1e-5, top_k=1)
    with pytest.raises(ConfigError, match="different prompts, and then in 2 passes over all openings no more; 9 were"):
        make(engine, 9, tmp_path / "a.jsonl", dull)
