"""Draft checkpoints that do not fit, are damaged or of another kind."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import build_tokenizer
from draft_blocks import dflash, dspark
from draft_heads import HIDDEN, Draft, build_target, eagle, eagle3, medusa
from safetensors.torch import load_file

from draftgraph import Engine
from draftgraph.model_zoo.draft_checkpoint import open_draft
from draftgraph.model_zoo.eagle3.checkpoint import target_ids
from draftgraph.model_zoo.errors import CheckpointError, UnsupportedModelError
from draftgraph.runtime.errors import ConfigError, NotAvailableError
from draftgraph.runtime.speculative_config import SpeculativeConfig

VOCAB = len(build_tokenizer())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("target")
    build_target(path, build_tokenizer())
    return path


def engine(target: Path, draft: Draft, path: Path, depth: int | None = 3, **options: object) -> Engine:
    spec = {**draft.spec, "model": str(draft.save(path)), "num_speculative_tokens": depth, **options}
    return Engine.from_pretrained(target, spec, dtype="float32", compile=False, max_model_len=128)


def change(draft: Draft, **fields: object) -> Draft:
    draft.config.update(fields)
    return draft


def without(draft: Draft, *names: str) -> Draft:
    for name in names:
        del draft.tensors[name]
    return draft


def with_tensor(draft: Draft, name: str, tensor: torch.Tensor) -> Draft:
    draft.tensors[name] = tensor
    return draft


def with_mask(draft: Draft, embedding: torch.Tensor) -> Draft:
    draft.extra["mask_embedding"] = embedding
    return draft


EXPERTS = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 8,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}

MISMATCHES: dict[str, tuple[Callable[[], Draft], str]] = {
    "vocabulary": (lambda: eagle(VOCAB + 5), rf"vocabulary of {VOCAB + 5}, but this one's is {VOCAB}"),
    "hidden size": (
        lambda: change(
            with_tensor(eagle3(VOCAB, own=True), "fc.weight", torch.zeros(HIDDEN, 3 * 48)), target_hidden_size=48
        ),
        "hidden size of 48, but this one's is 32",
    ),
    "number of aux layers": (
        lambda: change(eagle3(VOCAB), eagle_aux_hidden_state_layer_ids=[1, 2]),
        r"reads 3 hidden states of 32, .*: 2 hidden states",
    ),
    "an aux layer that is not there": (
        lambda: eagle3(VOCAB, ids=[1, 2, 12]),
        r"reads the target's hidden states \[1, 2, 12\] .* a target of 8 layers has 0 to 7",
    ),
    "the last layer, counted as an output": (
        lambda: eagle3(VOCAB, nested_ids=[0, 1, 7]),
        r"hidden states \[1, 2, 8\]",
    ),
    "no d2t": (lambda: without(eagle3(VOCAB, draft_vocab=50), "d2t"), rf"drafts 50 of {VOCAB} tokens, but lacks d2t"),
    "d2t of ids": (
        lambda: with_tensor(eagle3(VOCAB, draft_vocab=50), "d2t", torch.arange(50) + VOCAB - 60),
        r"gives ids from .* it must hold offsets",
    ),
    "too large a draft vocabulary": (
        lambda: change(eagle3(VOCAB), draft_vocab_size=VOCAB + 1),
        rf"draft_vocab_size {VOCAB + 1} exceeds the vocabulary of {VOCAB}",
    ),
    "no head": (lambda: without(eagle3(VOCAB, draft_vocab=50), "lm_head.weight"), "lacks tensors: lm_head.weight"),
    "no projection": (lambda: without(eagle3(VOCAB), "fc.weight"), "lacks fc.weight: 3 hidden states of 32"),
    "no mask": (
        lambda: without(eagle3(VOCAB, parallel=True), "mask_hidden"),
        "says parallel_drafting, but the eagle3 head lacks mask_hidden",
    ),
    "no mask token": (
        lambda: change(eagle3(VOCAB, parallel=True), ptd_token_id=None),
        "names no mask token: none of mask_token_id",
    ),
    "a mask token outside": (
        lambda: change(eagle3(VOCAB, parallel=True), ptd_token_id=VOCAB),
        f"the mask token is {VOCAB}, but",
    ),
    "a tensor without use": (
        lambda: with_tensor(eagle(VOCAB), "layers.0.extra.weight", torch.zeros(1)),
        "tensors without use: layers.0.extra.weight",
    ),
    "a missing tensor": (
        lambda: without(eagle(VOCAB), "layers.0.mlp.up_proj.weight"),
        "lacks tensors: model.layers.0.mlp.up_proj.weight",
    ),
    "a shape": (
        lambda: with_tensor(eagle(VOCAB), "layers.0.self_attn.o_proj.weight", torch.zeros(HIDDEN, 5)),
        r"has shape \[32, 5\], but its configuration makes it \[32, 32\]",
    ),
    "fc of another head": (
        lambda: with_tensor(eagle(VOCAB), "fc.weight", torch.zeros(HIDDEN, 3 * HIDDEN)),
        r"fc.weight of the eagle head has shape \[32, 96\], but config.json makes it \[32, 64\]",
    ),
    "a type": (
        lambda: with_tensor(eagle3(VOCAB, draft_vocab=50), "d2t", torch.zeros(50)),
        "d2t in .* is stored as F32; accepted: I64, I32",
    ),
    "another head": (lambda: Draft(medusa(VOCAB).config, medusa(VOCAB).tensors, {"method": "eagle"}), "'medusa'"),
    "target_layer_ids past the target": (
        lambda: dflash(VOCAB, ids=[1, 12]),
        r"target_layer_ids \[1, 12\] of the dflash head, read as layer_outputs, lie outside .* 8 layers has 0 to 7",
    ),
    "target_layer_ids before the embedding": (
        lambda: dspark(VOCAB, ids=[-2, 1]),
        r"target_layer_ids \[-2, 1\] of the dspark head, read as layer_outputs, lie outside",
    ),
    "another number of layers": (
        lambda: change(dflash(VOCAB), num_target_layers=9),
        "made for a target of 9 layers, but this one has 8",
    ),
    "a mask token outside of the vocabulary": (
        lambda: change(dflash(VOCAB, speculators=True), mask_token_id=VOCAB),
        f"the mask token is {VOCAB}, but the dflash head's vocabulary has {VOCAB} tokens",
    ),
    "no mask token for a block": (
        lambda: change(dspark(VOCAB), mask_token_id=None, dflash_config=None),
        "must give mask_token_id as an integer, got None",
    ),
    "a block of nothing": (
        lambda: change(dflash(VOCAB), block_size=1),
        "block_size is 1, in which the dflash head",
    ),
    "no layers": (
        lambda: change(dflash(VOCAB, speculators=True), transformer_layer_config=None),
        "transformer_layer_config of the draft head must describe its layers, got None",
    ),
    "a part that is none": (
        lambda: change(dflash(VOCAB), dflash_config=[1, 3]),
        r"dflash_config in config.json must be an object, got \[1, 3\]",
    ),
    "a vocabulary's size in words": (
        lambda: change(dflash(VOCAB), draft_vocab_size="many"),
        "draft_vocab_size of the draft head must be a positive integer, got 'many'",
    ),
    "a target of no size": (
        lambda: change(dspark(VOCAB), target_hidden_size=0),
        "target_hidden_size of the draft head must be a positive integer, got 0",
    ),
    "a flag that is none": (
        lambda: change(dspark(VOCAB), enable_confidence_head="yes"),
        "enable_confidence_head of the draft head must be true or false, got 'yes'",
    ),
    "no block size": (lambda: change(dflash(VOCAB), block_size=None), "must give block_size as an integer, got None"),
    "hidden sizes": (
        lambda: change(dflash(VOCAB, speculators=True, own=True), target_hidden_size=48),
        r"fc.weight of the dflash head .* reads 2 hidden states of 48, .* 3 hidden states",
    ),
    "another target's hidden size": (
        lambda: change(
            with_tensor(dflash(VOCAB, speculators=True, own=True), "fc.weight", torch.zeros(HIDDEN, 3 * 48)),
            target_hidden_size=48,
        ),
        "the dflash head was made for a target with a hidden size of 48, but this one's is 32",
    ),
    "a hidden size without an embedding": (
        lambda: change(
            with_tensor(dflash(VOCAB, speculators=True), "fc.weight", torch.zeros(HIDDEN, 3 * 48)),
            target_hidden_size=48,
        ),
        "lacks embed_tokens.weight, and the target's of hidden size 48 does not fit its hidden size of 32",
    ),
    "a reduced vocabulary without a map": (
        lambda: without(dflash(VOCAB, speculators=True, draft_vocab=50), "d2t"),
        rf"the dflash head drafts 50 of {VOCAB} tokens, but lacks d2t",
    ),
    "a Markov head's gate": (
        lambda: without(dspark(VOCAB, "gated"), "markov_head.gate_proj.weight"),
        "lacks tensors: markov_head.gate_proj.weight",
    ),
    "a confidence head's inputs": (
        lambda: with_tensor(dspark(VOCAB), "confidence_head.proj.weight", torch.zeros(1, HIDDEN)),
        r"confidence_head.proj.weight .* has shape \[1, 32\], but its configuration makes it \[1, 38\]",
    ),
    "a mask embedding of another size": (
        lambda: with_mask(dflash(VOCAB), torch.zeros(HIDDEN + 1)),
        r"mask_embedding in .* has shape \[33\], but its configuration makes it \[32\]",
    ),
    "a speculators head without layers": (
        lambda: change(eagle3(VOCAB, speculators=True), transformer_layer_config=None),
        "transformer_layer_config of the draft head must describe its layers, got None",
    ),
    "a part that is no object": (
        lambda: change(eagle3(VOCAB), eagle_config=[1]),
        r"eagle_config in config.json must be an object, got \[1\]",
    ),
    "proposal methods that are none": (
        lambda: change(eagle3(VOCAB, speculators=True), speculators_config={"proposal_methods": ["greedy"]}),
        r"proposal_methods in config.json must be a list of objects, got \['greedy'\]",
    ),
    "architectures that are none": (
        lambda: change(eagle(VOCAB), architectures=5),
        "architectures in config.json must be a list of strings, got 5",
    ),
    "no attention heads": (
        lambda: change(eagle(VOCAB), num_attention_heads=0),
        "num_attention_heads in config.json must be a positive integer, got 0",
    ),
    "truncated without a map": (
        lambda: without(medusa(VOCAB, blocks=True, size=60), "token_map"),
        f"draft 60 of {VOCAB} tokens, but lack token_map",
    ),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_what_does_not_fit_is_refused_before_weights_are_read(target, tmp_path, monkeypatch, case):
    make, message = MISMATCHES[case]
    if case != "d2t of ids":  # whose values have to be read
        monkeypatch.setattr("draftgraph.runtime.loading.load_model", None)
    with pytest.raises(CheckpointError, match=message), engine(target, make(), tmp_path):
        pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: change(eagle(VOCAB), model_type="rwkv"), "model type 'rwkv'; supported:"),
        (lambda: change(eagle(VOCAB), layer_types=["linear_attention"]), "layer types .'linear_attention'.; supported"),
        (
            lambda: change(eagle(VOCAB), model_type="deepseek_v3", **EXPERTS),
            r"draft heads with layers of 'deepseek_v3' \(latent attention, mixtures of experts\); supported: dense",
        ),
        (
            lambda: change(
                eagle3(VOCAB),
                model_type="qwen3_moe",
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=8,
                decoder_sparse_step=1,
            ),
            "draft heads with layers of 'qwen3_moe'",
        ),
        (lambda: change(eagle3(VOCAB, speculators=True), speculators_model_type="eagle"), "'eagle'; supported: eagle3"),
        (
            lambda: change(eagle3(VOCAB), eagle_config={"use_aux_hidden_state": False}),
            "use_aux_hidden_state false; supported: true",
        ),
        (lambda: change(dflash(VOCAB), projector_type="domino"), "projector_type 'domino'; supported: dflash"),
        (lambda: dflash(VOCAB, sliding=3), "sliding window of 3 positions, less than the block_size of 6"),
        (lambda: change(dflash(VOCAB), attention_sink_bias=True), "attention_sink_bias True in a draft head"),
        (
            lambda: change(dspark(VOCAB), markov_head_type="lstm", dflash_config=None),
            "'lstm'; supported: vanilla",
        ),
    ],
)
def test_kinds_that_are_not_implemented_are_refused(target, tmp_path, make, message):
    with pytest.raises(UnsupportedModelError, match=message), engine(target, make(), tmp_path):
        pass


class _Payload:
    def __reduce__(self):
        return (print, ("this must not run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"0.1.weight": _Payload()}, "is refused: it is a pickle that holds more than plain tensors"),
        ([torch.zeros(2)], "is refused: it must hold one dictionary of tensors"),
        ({"0.1.weight": 3}, "is refused: it must hold one dictionary of tensors"),
        ({"0.1.weight": torch.zeros(2, 2).to_sparse()}, "by name, dense ones, and nothing else"),
        (None, "is damaged or no PyTorch file"),
    ],
)
def test_pickles_of_anything_but_tensors_are_refused(tmp_path, capsys, content, message):
    draft = medusa(VOCAB)
    draft.save(tmp_path)
    if content is None:
        (tmp_path / draft.file).write_bytes(b"PK\x03\x04 not a file of tensors")
    else:
        torch.save(content, tmp_path / draft.file)
    with pytest.raises(CheckpointError, match=message):
        open_draft(tmp_path)
    assert "this must not run" not in capsys.readouterr().out


def test_a_pickle_cut_short(tmp_path):
    draft = medusa(VOCAB)
    path = draft.save(tmp_path) / draft.file
    whole = path.read_bytes()
    for keep in (0, 10, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:keep])
        with pytest.raises(CheckpointError, match="is damaged or no PyTorch file"):
            open_draft(tmp_path)


def test_heads_merged_with_their_model(target, tmp_path):
    draft, base = medusa(VOCAB), load_file(target / "model.safetensors")
    draft.tensors = {**base, **{f"medusa_head.{name}": tensor for name, tensor in draft.tensors.items()}}
    draft.config = {**json.loads((target / "config.json").read_text()), "medusa_num_heads": 7}
    draft.file = "model.safetensors"
    with engine(target, draft, tmp_path) as made:
        assert made._core._speculator.name == "medusa"
    checkpoint = open_draft(tmp_path)
    assert (checkpoint.config.method, checkpoint.missing, checkpoint.unexpected) == ("medusa", [], [])


@pytest.mark.parametrize(
    ("fields", "token"),
    [
        ({"dflash_config": {"mask_token_id": 1}, "mask_token_id": 2}, 1),
        ({"mask_token_id": 2, "dspark_noise_token_id": 3}, 2),
        ({"dspark_noise_token_id": 3, "pard_token": 4}, 3),
        ({"pard_token": 4}, 4),
        ({}, 7),
    ],
)
def test_the_mask_token_is_the_first_that_is_named(tmp_path, fields, token):
    draft = eagle3(VOCAB, parallel=True)
    assert draft.config["ptd_token_id"] == 7
    assert open_draft(change(draft, **fields).save(tmp_path)).config.mask_token == token


def test_fewer_heads_than_drafts(target, tmp_path):
    with pytest.raises(ConfigError, match=r"is 5, but .* has 4 Medusa heads: use at most 4"):
        engine(target, medusa(VOCAB, heads=4), tmp_path, depth=5)


@pytest.mark.parametrize(
    ("make", "depth", "message"),
    [
        (lambda: dflash(VOCAB), 6, r"is 6, but .* has a block_size of 6, one place of which .* anchor: use at most 5"),
        (lambda: dspark(VOCAB), 7, r"is 7, but .* has a block_size of 6: use at most 6"),
        (lambda: dflash(VOCAB, block=100), 64, r"is 64, but .* has a block_size of 100, .*: use at most 63"),
    ],
)
def test_blocks_with_fewer_places_than_drafts(target, tmp_path, make, depth, message):
    with pytest.raises(ConfigError, match=message):
        engine(target, make(), tmp_path, depth=depth)


def test_fewer_drafts_than_a_block_was_trained_for_are_warned_of(target, tmp_path, caplog):
    with engine(target, dflash(VOCAB), tmp_path / "a", depth=None) as made:
        assert made.config.speculative.num_speculative_tokens == 5
    assert "was trained to draft" not in caplog.text
    with engine(target, dflash(VOCAB, causal=True), tmp_path / "b", depth=2):
        assert "was trained to draft" not in caplog.text
    with engine(target, dflash(VOCAB), tmp_path / "a", depth=2):
        assert "was trained to draft 5 tokens at once, which all see each other, and is asked for 2" in caplog.text


def test_layers_that_a_drafter_of_blocks_does_not_name(tmp_path):
    """Evenly spaced, as in the published configurations that do name them."""
    draft = dflash(VOCAB, layers=5, ids=[1, 9, 17, 25, 33])
    del draft.config["dflash_config"]["target_layer_ids"]
    draft.config["num_target_layers"] = 36
    config = open_draft(draft.save(tmp_path)).config
    assert config.aux.stored == (1, 9, 17, 25, 33)
    assert config.aux.source == "the default"


def test_options_of_drafters_of_blocks(target, tmp_path):
    with pytest.raises(ConfigError, match=rf"dspark_draft_topk is 999, but .* drafts {VOCAB} tokens: use at most"):
        engine(target, dspark(VOCAB), tmp_path, dspark_draft_topk=999)
    with pytest.raises(ConfigError, match="attention_backend 'triton' is not for the device 'cpu'; accepted: auto, "):
        engine(target, dflash(VOCAB), tmp_path, attention_backend="triton")


def test_parallel_drafting_needs_a_head_for_it(target, tmp_path):
    with pytest.raises(ConfigError, match=r"parallel_drafting needs a head that was made for it, .* no mask_hidden"):
        engine(target, eagle3(VOCAB), tmp_path, parallel_drafting=True)
    with pytest.raises(NotAvailableError, match="parallel_drafting is not available with method 'ngram'"):
        SpeculativeConfig(method="ngram", num_speculative_tokens=2, parallel_drafting=True).require_available()


def test_numbering_is_an_option_of_eagle3(target, tmp_path):
    with pytest.raises(
        ConfigError, match="aux_layer_numbering must be one of 'hidden_states', 'layer_outputs', got 'x'"
    ):
        SpeculativeConfig(method="eagle3", model="m", aux_layer_numbering="x")
    with pytest.raises(ConfigError, match=r"aux_layer_numbering needs method 'eagle3', .*got 'eagle'"):
        SpeculativeConfig(method="eagle", model="m", aux_layer_numbering="layer_outputs")


@pytest.mark.parametrize(
    ("ids", "numbering", "expected", "words"),
    [
        ({}, None, (2, 4, 5), r"layers none given, read as hidden_states \(the default\)"),
        ({"ids": [1, 4, 6]}, None, (1, 4, 6), r"1, 4, 6, read as hidden_states \(the original format\)"),
        ({"nested_ids": [1, 4, 6]}, None, (2, 5, 7), r"1, 4, 6, read as layer_outputs \(eagle_config\)"),
        ({"ids": [1, 4, 6]}, "layer_outputs", (2, 5, 7), r"read as layer_outputs \(the option aux_layer_numbering\)"),
        ({"ids": [1, 4, 6], "speculators": True}, None, (1, 4, 6), r"hidden_states \(the speculators format\)"),
    ],
)
def test_the_numbering_of_layers_is_decided_by_format_and_logged(
    target, tmp_path, caplog, ids, numbering, expected, words
):
    with (
        caplog.at_level(logging.INFO, "draftgraph.runtime.head_loading"),
        engine(target, eagle3(VOCAB, **ids), tmp_path, aux_layer_numbering=numbering) as made,
    ):
        assert made._core._speculator.target_states == expected
    assert re.search(words, caplog.text)
    assert f"hidden states {', '.join(map(str, expected))}" in caplog.text


def test_the_embedding_is_shared_unless_it_differs(target, tmp_path):
    table = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    for name, own, shared in (("same", table, True), ("other", table + 1.0, False)):
        draft = with_tensor(eagle(VOCAB), "embed_tokens.weight", own)
        with engine(target, draft, tmp_path / name) as made:
            head = made._core._speculator._head
            assert (head._embedding is made._target.model.weights.embedding) is shared


@pytest.mark.parametrize("make", [eagle, eagle3])
def test_the_head_is_shared_unless_it_differs(target, tmp_path, make):
    weight = load_file(target / "model.safetensors")["lm_head.weight"]
    for name, own, shared in (("same", weight, True), ("other", weight + 1.0, False)):
        draft = with_tensor(make(VOCAB), "lm_head.weight", own)
        with engine(target, draft, tmp_path / name) as made:
            head = made._core._speculator._head
            found = head._head if make is eagle else head._weights.head
            assert (found is made._target.model.weights.head) is shared


def test_d2t_holds_offsets():
    d2t, marked = torch.tensor([2, 2, 5]), torch.zeros(10, dtype=torch.bool)
    marked[[2, 3, 7]] = True
    assert target_ids(d2t, marked, 10).tolist() == [2, 3, 7]
    with pytest.raises(CheckpointError, match="gives other tokens than t2d marks"):
        target_ids(d2t, ~marked, 10)
    with pytest.raises(CheckpointError, match="gives ids from 2 to 7, but the vocabulary has 7 tokens"):
        target_ids(d2t, None, 7)
