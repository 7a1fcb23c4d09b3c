"""Heads that know nothing, shipped for a small target."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file

from draftgraph.model_zoo.dflash.training import DFlashOptions, DFlashTrainee
from draftgraph.model_zoo.dspark.training import DSparkOptions, DSparkTrainee
from draftgraph.model_zoo.eagle3.training import Eagle3Options, Eagle3Trainee
from draftgraph.model_zoo.training.draft_vocabulary import DraftVocabulary
from draftgraph.model_zoo.training.export import export_head
from draftgraph.model_zoo.training.layers import LayerShape
from draftgraph.model_zoo.training.trainee import TargetFacts, Trainee
from draftgraph.runtime.train.ship_head import ship_head

TARGET = "a-small-model"
METHODS = ("dflash", "dspark", "eagle3")
HELD_OUT = {
    "what": "nothing",
    "num_speculative_tokens": 3,
    "mean_acceptance_length": 1.5,
    "acceptance_by_position": [0.4, 0.1],
}


def trainees(target: Path) -> list[Trainee]:
    """One untrained head of each method, beside a target that is a Llama with a head of its own."""
    config = json.loads((target / "config.json").read_text())
    weights = load_file(target / "model.safetensors")
    facts = TargetFacts(
        config=config,
        name=TARGET,
        embedding=weights["model.embed_tokens.weight"].float(),
        head=weights["lm_head.weight"].float(),
        final_norm=weights["model.norm.weight"].float(),
        layers=(),
    )
    shape = LayerShape(
        hidden_size=config["hidden_size"],
        intermediate_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=config["head_dim"],
        norm_eps=1e-5,
        rope_theta=10000.0,
    )
    vocabulary = DraftVocabulary(torch.arange(0, config["vocab_size"], 2), config["vocab_size"])
    return [
        Eagle3Trainee(facts, shape, vocabulary, Eagle3Options(num_drafts=3)),
        DFlashTrainee(facts, shape, vocabulary, DFlashOptions(num_drafts=3, num_layers=1)),
        DSparkTrainee(facts, shape, vocabulary, DSparkOptions(num_drafts=3, num_layers=1, markov_rank=4)),
    ]


def ship_untrained(target: Path, scratch: Path) -> None:
    """Ships them for `target`; dspark is the best by its note."""
    for number, trainee in enumerate(trainees(target)):
        directory = scratch / trainee.method
        export_head(trainee, directory)
        note = {"command": "none", "data": "none", "seed": 0}
        length = {"mean_acceptance_length": HELD_OUT["mean_acceptance_length"] + number}
        ship_head(directory, TARGET, target, {**note, "held_out": {**HELD_OUT, **length}})
