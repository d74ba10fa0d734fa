"""torch.compile by the key: the same numbers, one graph for all layers, none for a new batch."""

import shutil

import pytest
import torch
from torch._dynamo.utils import counters

from pretrain.loss import pretraining_loss
from tests.pretrain.packing import STILL, pack, sequences
from tests.pretrain.test_model import make

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler for inductor"),
    pytest.mark.filterwarnings("ignore"),  # inductor's own
]


def gradients(model, batch):
    model.zero_grad()
    packed, positions, labels = batch
    mlm, nsp = model(*packed, positions, torch.tensor([0, 40]))
    sums = pretraining_loss(mlm, labels, nsp, torch.tensor([0, 1]), 4, 2)
    sums.loss.backward()
    return [sums.loss.detach(), *(p.grad.clone() for p in model.parameters())]


def batch(lengths: list[int], seed: int):
    a, b, c, d = sequences(lengths, 101, seed)
    packed = pack([[a, b], [c, d]], row_len=40, max_seq_len=32)
    return packed, torch.tensor([1, 3, 41, 44]), torch.tensor([5, 6, 7, 8])


@pytest.mark.parametrize("path", ["per_sequence", "sdpa"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_compiled_equals_eager_with_one_graph_and_no_recompilation(path, checkpointing):
    torch._dynamo.reset()
    counters.clear()
    shape = STILL.model_copy(update={"attention": path, "num_hidden_layers": 3})
    eager = make(shape)
    compiled = make(
        shape.model_copy(update={"compile": True, "activation_checkpointing": checkpointing})
    )
    assert eager.state_dict().keys() == compiled.state_dict().keys()
    for i, lengths in enumerate([[17, 9, 30, 2], [5, 32, 11, 11], [2, 2, 2, 2]]):
        one = batch(lengths, seed=i)
        for a, b in zip(gradients(eager, one), gradients(compiled, one), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]


@pytest.mark.parametrize("path", ["per_sequence", "sdpa"])
def test_one_graph_serves_every_number_of_runs(path):
    """Runs of no tokens at the end change nothing, and a new number of them compiles nothing."""
    torch._dynamo.reset()
    counters.clear()
    shape = STILL.model_copy(update={"attention": path, "num_hidden_layers": 2})
    eager, compiled = make(shape), make(shape.model_copy(update={"compile": True}))
    packed, *rest = batch([17, 9, 30, 2], seed=0)
    alone = gradients(eager, (packed, *rest))
    for runs in (32, 64, 96, 160, 224):
        filler = packed.cu_seqlens.new_full((runs - len(packed.cu_seqlens),), 80)
        wide = packed._replace(cu_seqlens=torch.cat([packed.cu_seqlens, filler]))
        assert len(wide.cu_seqlens) == runs and wide.cu_seqlens[-1] == packed.cu_seqlens[-1]
        for a, b in zip(alone, gradients(eager, (wide, *rest)), strict=True):
            assert torch.equal(a, b)
        for a, b in zip(alone, gradients(compiled, (wide, *rest)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
