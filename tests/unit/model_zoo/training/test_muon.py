import pytest
import torch
from torch import nn

from draftgraph.model_zoo.training import muon
from draftgraph.model_zoo.training.muon import Muon, orthogonalised

GROUP = {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "eps": 1e-7}


def steps(optimizer_class, dtype=torch.float32, **options):
    """Three matrices after four updates with gradients that are the same for every optimiser."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((24, 40), (40, 24), (16, 16))
    matrices = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer = optimizer_class(matrices, lr=0.02, weight_decay=0.05, **options)
    for _ in range(4):
        for matrix in matrices:
            matrix.grad = torch.randn(matrix.shape, generator=generator)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([matrix.detach().flatten() for matrix in matrices]), optimizer


@pytest.mark.parametrize("fast", [True, False])
def test_it_is_pytorchs(monkeypatch, fast):
    monkeypatch.setattr(muon, "has_fast_bfloat16", lambda device: fast)
    mine, optimizer = steps(Muon)
    theirs, other = steps(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
    start, _ = steps(lambda matrices, **options: torch.optim.SGD(matrices, lr=0.0))
    moved = (theirs - start).norm()
    # In bfloat16 to the rounding of the sum; in float32 to that of bfloat16's products.
    assert (mine - theirs).norm() < (1e-5 if fast else 0.02) * moved
    # Checkpoints of one are the other's.
    other.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("shape", [(24, 40), (40, 24), (16, 16)])
def test_directions_are_orthogonal(monkeypatch, shape):
    monkeypatch.setattr(muon, "has_fast_bfloat16", lambda device: False)
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    kept = matrix.clone()
    found = orthogonalised(matrix, GROUP)
    assert torch.equal(matrix, kept)
    values = torch.linalg.svdvals(found)
    assert values.min() > 0.4
    assert values.max() < 1.3
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert nn.functional.cosine_similarity(found.flatten(), (u @ v).flatten(), dim=0) > 0.95


def test_parameters_without_a_gradient_stay():
    left, learnt = (nn.Parameter(torch.ones(8, 8)) for _ in range(2))
    optimizer = Muon([left, learnt], lr=0.1)
    learnt.grad = torch.eye(8)
    optimizer.step()
    assert torch.equal(left, torch.ones(8, 8))
    assert not torch.equal(learnt, torch.ones(8, 8))
    with pytest.raises(ValueError, match="closures are not supported"):
        optimizer.step(lambda: None)
