"""Every family against transformers: prefill, chunks, decoding and packs of rows."""

from __future__ import annotations

import functools
import tempfile

import pytest
import torch
from tiny_models import MODELS, SLOTS, pack, random_tokens, tiny_model

from draftgraph.model_zoo import DecoderModel, load_model

CONTEXT = 128


@functools.cache
def _models(name: str):
    """The transformers model, and ours from the checkpoint that it saves."""
    reference = tiny_model(name)
    with tempfile.TemporaryDirectory() as directory:
        reference.save_pretrained(directory)
        return reference, load_model(directory, dtype=torch.float32)


def _reference_logits(model, tokens):
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0]


def _run(model: DecoderModel, cache, rows, width=None):
    window = pack(rows, width)
    with torch.inference_mode():
        logits = model.logits(model.forward(window, cache))
    return logits[: int(window.cu_tokens[-1])]


def _assert_close(result, expected):
    assert result.shape == expected.shape
    error = (result - expected).abs().max() / expected.abs().max()
    assert error < 1e-4, f"relative error {error:.2e}"


@pytest.mark.parametrize("name", MODELS)
def test_whole_prompt(name) -> None:
    reference, model = _models(name)
    tokens = random_tokens(90, 1)
    result = _run(model, model.allocate_cache(SLOTS, CONTEXT), [(tokens, 0, 1)], width=96)
    _assert_close(result, _reference_logits(reference, tokens))


@pytest.mark.parametrize("name", MODELS)
def test_chunks_then_tokens(name) -> None:
    reference, model = _models(name)
    tokens = random_tokens(90, 2)
    cache = model.allocate_cache(SLOTS, CONTEXT)
    results = []
    for start, end in ((0, 32), (32, 70), *((i, i + 1) for i in range(70, 90))):
        results.append(_run(model, cache, [(tokens[start:end], start, 2)]))
    _assert_close(torch.cat(results), _reference_logits(reference, tokens))


@pytest.mark.parametrize("name", MODELS)
def test_packed_rows(name) -> None:
    reference, model = _models(name)
    cache = model.allocate_cache(SLOTS, CONTEXT)
    sequences = {0: random_tokens(40, 3), 3: random_tokens(75, 4), 1: random_tokens(20, 5)}
    committed = {0: 33, 3: 70, 1: 0}
    for slot, count in committed.items():
        if count:
            _run(model, cache, [(sequences[slot][:count], 0, slot)])
    # A padding row too, which has no tokens and points to the reserved slot.
    rows = [(sequences[slot][count:], count, slot) for slot, count in committed.items()]
    rows.insert(1, ([], 0, SLOTS - 1))
    result = _run(model, cache, rows, width=64)
    expected = [_reference_logits(reference, sequences[slot])[count:] for slot, count in committed.items()]
    _assert_close(result, torch.cat(expected))


@pytest.mark.parametrize("name", MODELS)
def test_greedy_text(name) -> None:
    reference, model = _models(name)
    prompt = random_tokens(17, 6)
    with torch.inference_mode():
        expected = reference.generate(torch.tensor([prompt]), max_new_tokens=30, min_new_tokens=30, do_sample=False)[
            0, len(prompt) :
        ].tolist()
    cache = model.allocate_cache(SLOTS, CONTEXT)
    # `min_new_tokens` forbids the end token there, so it is forbidden here.
    banned = list(model.config.eos_token_ids)
    logits = _run(model, cache, [(prompt, 0, 0)])
    generated: list[int] = []
    while len(generated) < 30:
        last = logits[-1].clone()
        last[banned] = float("-inf")
        generated.append(int(last.argmax()))
        logits = _run(model, cache, [([generated[-1]], len(prompt) + len(generated) - 1, 0)], width=2)
    assert generated == expected


@pytest.mark.parametrize("name", MODELS)
def test_hidden_states(name) -> None:
    reference, model = _models(name)
    tokens, layers = random_tokens(30, 7), (0, 2, model.config.num_layers)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        hidden, states = model.forward_with_aux(pack([(tokens, 0, 1)]), model.allocate_cache(SLOTS, CONTEXT), layers)
    for state, index in zip(states, layers, strict=True):
        _assert_close(state, expected[index][0])
    assert torch.equal(hidden, states[-1])


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_bfloat16_is_close(name, tmp_path) -> None:
    reference = tiny_model(name)
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16)
    tokens = random_tokens(40, 8)
    result = _run(model, model.allocate_cache(SLOTS, CONTEXT), [(tokens, 0, 1)]).float()
    expected = _reference_logits(reference, tokens)
    assert (result - expected).abs().max() / expected.abs().max() < 0.06


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "deepseek_v3", "qwen3_moe"])
def test_row_does_not_depend_on_the_pack_bit_for_bit(name, dtype, tmp_path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=dtype)
    tokens = random_tokens(30, 9)
    results = []
    for index in range(3):
        cache = model.allocate_cache(SLOTS, CONTEXT)
        _run(model, cache, [(tokens[:25], 0, index)], width=32)
        rows = [(random_tokens(4, 10 + index), 0, 3), (tokens[25:], 25, index)]
        results.append(_run(model, cache, rows[:: 1 if index % 2 else -1], width=16))
    first, last = results[0][:5], results[2][:5]
    assert torch.equal(first, last)
    assert torch.equal(first, results[1][4:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma3", "deepseek_v3", "gemma4-moe"])
def test_token_by_token_equals_one_window_bit_for_bit(name, dtype, tmp_path) -> None:
    tiny_model(name).save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=dtype)
    tokens = random_tokens(100, 11)
    results = []
    for size in (1, 3, 8):
        cache = model.allocate_cache(SLOTS, CONTEXT)
        _run(model, cache, [(tokens[:52], 0, 1)], width=64)
        windows = [(tokens[i : i + size], i, 1) for i in range(52, 100, size)]
        results.append(torch.cat([_run(model, cache, [window], width=8) for window in windows]))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
