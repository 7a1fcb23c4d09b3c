import pytest
import torch
from safetensors.torch import save_file

from draftgraph.model_zoo.errors import TrainingConfigError
from draftgraph.model_zoo.training.trainee import Trainee
from draftgraph.model_zoo.training.warm_start import warm_start


class Small(Trainee):
    method, num_drafts = "small", 1

    def __init__(self, offset=0, rows=6):
        super().__init__()
        self.fc = torch.nn.Linear(3, 4, bias=False)
        self.lm_head = torch.nn.Linear(4, rows, bias=False)
        self.offset = offset

    def states_of(self, num_layers):
        return ()

    def forward(self, batch, generator):
        raise NotImplementedError

    def config_json(self):
        return {}

    def export_tensors(self):
        return {**super().export_tensors(), "d2t": torch.full((len(self.lm_head.weight),), self.offset)}


def saved(head, directory, **changes):
    save_file(
        {**{name: tensor.clone() for name, tensor in head.export_tensors().items()}, **changes},
        directory / "model.safetensors",
    )
    return directory


def test_what_fits_is_taken(tmp_path):
    given, head = Small(), Small()
    begun = warm_start(head, saved(given, tmp_path))
    assert (begun.taken, begun.left) == (("fc.weight", "lm_head.weight"), ())
    assert torch.equal(head.fc.weight, given.fc.weight)
    assert torch.equal(head.lm_head.weight, given.lm_head.weight)


def test_of_other_tokens_those_that_both_draft_are_taken(tmp_path):
    """The given head drafts tokens 0 to 5, the new one tokens 2 to 7."""
    given, head = Small(), Small(offset=2)
    begun_with = head.lm_head.weight.clone()
    begun = warm_start(head, saved(given, tmp_path))
    assert (begun.taken, begun.left) == (("fc.weight", "lm_head.weight"), ())
    assert torch.equal(head.lm_head.weight[:4], given.lm_head.weight[2:])
    assert torch.equal(head.lm_head.weight[4:], begun_with[4:])


def test_rows_of_tokens_are_taken_from_a_head_of_more_tokens(tmp_path):
    given, head = Small(rows=9), Small(offset=3)
    warm_start(head, saved(given, tmp_path))
    assert torch.equal(head.lm_head.weight, given.lm_head.weight[3:])


def test_a_head_of_which_nothing_fits_is_refused(tmp_path):
    small = {"fc.weight": torch.zeros(2, 2), "lm_head.weight": torch.zeros(1, 1)}
    message = r"nothing of the head in .* fits this one: it has fc\.weight \[2, 2\], .* this one fc\.weight \[4, 3\]"
    with pytest.raises(TrainingConfigError, match=message):
        warm_start(Small(), saved(Small(), tmp_path, **small))
    (tmp_path / "model.safetensors").write_bytes(b"short")
    with pytest.raises(TrainingConfigError, match="cannot be read"):
        warm_start(Small(), tmp_path)
