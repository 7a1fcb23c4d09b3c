import dataclasses
import math

import pytest

from draftgraph.runtime.errors import RequestError
from draftgraph.runtime.sampling_params import SamplingParams


def test_the_default_is_greedy():
    params = SamplingParams()
    assert params.greedy
    assert (params.temperature, params.top_k, params.top_p, params.min_p) == (0.0, 0, 1.0, 0.0)
    assert params.max_tokens == 256
    assert params.stop == ()
    assert not SamplingParams(temperature=0.1).greedy


def test_values_are_kept_in_one_form():
    assert SamplingParams(top_k=-1).top_k == 0
    assert SamplingParams(stop="end").stop == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams(stop=None, stop_token_ids=None).stop == ()
    assert SamplingParams(stop_token_ids=[1, 2]).stop_token_ids == (1, 2)
    assert hash(SamplingParams(stop=["a"])) == hash(SamplingParams(stop=("a",)))


def test_bounds_that_are_included():
    SamplingParams(top_p=1, min_p=0, n=1, max_tokens=1, logprobs=0, seed=-(2**63))
    SamplingParams(top_p=1e-9, min_p=1, logprobs=20, seed=2**63 - 1, stop_token_ids=range_list(7))


def range_list(count):
    return list(range(count))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, r"temperature must be in \[0, 100000\], got -0\.1"),
        ({"temperature": 1e300}, r"temperature must be in \[0, 100000\], got 1e\+300"),
        ({"temperature": 1e-45}, r"temperature must be 0 \(greedy\) or at least 1e-05, got 1e-45"),
        ({"n": 16385}, r"n must be from 1 to 16384, got 16385"),
        ({"temperature": math.nan}, r"temperature must be .* got nan"),
        ({"temperature": math.inf}, r"temperature must be .* got inf"),
        ({"temperature": "hot"}, r"temperature must be .* got 'hot'"),
        ({"temperature": True}, r"temperature must be .* got True"),
        ({"top_k": -2}, r"top_k must be from -1 to 2147483647, got -2"),
        ({"top_k": 1.5}, r"top_k must be an integer, got 1\.5"),
        ({"top_k": 2**31}, r"top_k must be from -1"),
        ({"top_p": 0}, r"top_p must be in \(0, 1\], got 0"),
        ({"top_p": 1.01}, r"top_p must be in \(0, 1\], got 1\.01"),
        ({"top_p": math.nan}, r"top_p must be in \(0, 1\], got nan"),
        ({"min_p": -0.1}, r"min_p must be in \[0, 1\], got -0\.1"),
        ({"min_p": 1.1}, r"min_p must be in \[0, 1\], got 1\.1"),
        ({"seed": 2**63}, r"seed must be from -9223372036854775808 to 9223372036854775807"),
        ({"seed": 1.0}, r"seed must be an integer, got 1\.0"),
        ({"max_tokens": 0}, r"max_tokens must be from 1 .* got 0"),
        ({"n": 0}, r"n must be from 1 to 16384, got 0"),
        ({"n": True}, r"n must be an integer, got True"),
        ({"stop": ""}, r"stop must not hold the empty string"),
        ({"stop": ["a", ""]}, r"stop must not hold the empty string"),
        ({"stop": 3}, r"stop must be a string or a list of strings, got 3"),
        ({"stop": [3]}, r"stop must be a string or a list of strings, got \[3\]"),
        ({"stop_token_ids": range_list(8)}, r"stop_token_ids holds at most 7 ids, got 8"),
        ({"stop_token_ids": [-1]}, r"each of stop_token_ids must be from 0 .* got -1"),
        ({"stop_token_ids": ["a"]}, r"each of stop_token_ids must be an integer, got 'a'"),
        ({"stop_token_ids": 5}, r"stop_token_ids must be a list of token ids, got 5"),
        ({"ignore_eos": 1}, r"ignore_eos must be true or false, got 1"),
        ({"logprobs": 21}, r"logprobs must be from 0 to 20, got 21"),
        ({"logprobs": -1}, r"logprobs must be from 0 to 20, got -1"),
        ({"logprobs": True}, r"logprobs must be an integer, got True"),
    ],
)
def test_invalid(options, message):
    with pytest.raises(RequestError, match=message):
        SamplingParams(**options)


def test_frozen_and_replaceable():
    params = SamplingParams(stop="x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.top_k = 3
    assert dataclasses.replace(params, max_tokens=3).stop == ("x",)
