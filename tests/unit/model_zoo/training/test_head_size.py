"""What a head will have to learn is known before anything is loaded."""

import json
from pathlib import Path

import pytest
import torch
from small_training import VOCAB, save_target

from draftgraph.model_zoo.training.draft_vocabulary import DraftVocabulary
from draftgraph.model_zoo.training.head_size import learning_parameters, planned_head
from draftgraph.model_zoo.training.registry import METHODS, trainable
from draftgraph.model_zoo.training.target import FrozenTarget


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.mark.parametrize("intermediate_size", [None, 24])
@pytest.mark.parametrize("train_head", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_the_count_is_that_of_the_head_that_is_made(target, method, train_head, intermediate_size):
    kind = trainable(method)
    options = kind.options(**({"train_head": train_head} if hasattr(kind.options, "train_head") else {}))
    size = VOCAB // 2 if kind.reduced_vocabulary else VOCAB
    frozen = FrozenTarget(target, dtype=torch.float32, device=torch.device("cpu"), name="target")
    vocabulary = DraftVocabulary(torch.arange(size), VOCAB)
    head = kind.build(frozen.facts(), frozen.layer_shape(intermediate_size), vocabulary, options)
    config = json.loads((target / "config.json").read_text())
    planned = planned_head(method, config, options, draft_vocab_size=size, intermediate_size=intermediate_size)
    assert learning_parameters(planned) == learning_parameters(head) > 0
    assert {name: tensor.shape for name, tensor in planned.state_dict().items()} == {
        name: tensor.shape for name, tensor in head.state_dict().items()
    }


def test_what_cannot_be_made_is_refused_without_weights(target):
    config = json.loads((target / "config.json").read_text())
    options = trainable("eagle3").options(aux_layers=(99,))
    with pytest.raises(ValueError, match="aux_layers must be hidden states"):
        planned_head("eagle3", config, options, draft_vocab_size=VOCAB, intermediate_size=None)
