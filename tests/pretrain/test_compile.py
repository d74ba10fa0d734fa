"""torch.compile by the key: the same numbers, one graph for all layers, none for a new batch."""

import shutil

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import metrics
from torch._inductor.utils import fresh_cache

from core.errors import UserError
from pretrain.loss import IGNORE_INDEX, pretraining_loss
from pretrain.model import check_compiler
from tests.pretrain.packing import STILL, TINY, pack, sequences
from tests.pretrain.test_model import make

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler for inductor"),
    pytest.mark.filterwarnings("ignore"),  # inductor's own
]

# Embeddings, layer, heads, next sentence; the cross-entropy's two passes.
TRAIN_GRAPHS = 4 + 2


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    counters.clear()


def graphs() -> int:
    assert not counters["graph_break"]
    return counters["stats"]["unique_graphs"]


def sums_of(model, batch):
    packed, positions, labels, cls_positions, nsp_labels = batch
    mlm, nsp = model(*packed, positions, cls_positions)
    compiled = model.config.compile
    return pretraining_loss(mlm, labels, nsp, nsp_labels, len(labels), 2, compiled=compiled)


def gradients(model, batch):
    model.zero_grad()
    sums = sums_of(model, batch)
    sums.loss.backward()
    return [sums.loss.detach(), *(p.grad.clone() for p in model.parameters())]


def batch(lengths: list[int], seed: int, runs: int | None = None, row_len: int = 40):
    """Four sequences in two rows; `runs`: so many boundaries, the last ones of empty runs. Longer
    rows have more slots for predictions and sequences, as in another phase."""
    a, b, c, d = sequences(lengths, 101, seed)
    packed = pack([[a, b], [c, d]], row_len=row_len, max_seq_len=row_len - 8)
    if runs is not None:
        real = packed.cu_seqlens.unique()
        filler = real.new_full((runs - len(real),), 2 * row_len)
        packed = packed._replace(cu_seqlens=torch.cat([real, filler]))
    slots = (row_len - 40) // 8
    none = torch.full((slots,), IGNORE_INDEX)
    return (
        packed,
        torch.tensor([1, 3, 41, 44] + [0] * slots),
        torch.cat([torch.tensor([5, 6, 7, IGNORE_INDEX]), none]),
        torch.tensor([0, row_len] + [0] * slots),
        torch.cat([torch.tensor([0, 1]), none]),
    )


@pytest.mark.parametrize("path, checkpointing", [("per_sequence", True), ("sdpa", False)])
def test_compiled_equals_eager_with_one_graph_and_no_recompilation(path, checkpointing):
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
        assert graphs() == TRAIN_GRAPHS


@pytest.mark.parametrize("path", ["per_sequence", "sdpa"])
def test_left_to_right_without_next_sentence_compiles_as_much(path):
    shape = STILL.model_copy(update={"attention": path, "is_decoder": True})
    eager, compiled = make(shape), make(shape.model_copy(update={"compile": True}))
    for i, lengths in enumerate([[17, 9, 30, 2], [5, 32, 11, 11]]):
        packed, positions, labels, *rest = batch(lengths, seed=i)
        one = packed, positions, labels, *(t[:0] for t in rest)
        for a, b in zip(gradients(eager, one), gradients(compiled, one), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert graphs() <= TRAIN_GRAPHS


@pytest.mark.parametrize("path", ["per_sequence", "sdpa"])
def test_one_graph_serves_every_number_of_runs(path):
    """Runs of no tokens at the end change nothing, and a new number of them compiles nothing."""
    shape = STILL.model_copy(update={"attention": path})
    eager, compiled = make(shape), make(shape.model_copy(update={"compile": True}))
    alone = gradients(eager, batch([17, 9, 30, 2], seed=0))
    for runs in (32, 64, 96, 224):
        wide = batch([17, 9, 30, 2], seed=0, runs=runs)
        assert len(wide[0].cu_seqlens) == runs
        for a, b in zip(alone, gradients(eager, wide), strict=True):
            assert torch.equal(a, b)
        for a, b in zip(alone, gradients(compiled, wide), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
        assert graphs() == TRAIN_GRAPHS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_run_of_two_phases_makes_twenty_graphs(dtype):
    """Each phase 6 for training and 4 for evaluation (no backward, one forward pass of the
    cross-entropy for both), however many layers, batches, runs and turns. The default limit is
    8 a piece of code; beyond it torch would go on eagerly."""
    model = make(TINY.model_copy(update={"compile": True, "num_hidden_layers": 12})).to(dtype)
    counted = []
    torch.compiler.set_stance("default", force_backend="eager")
    try:
        for row_len in (40, 48):
            for training in (True, False, True, False):
                model.train(training)
                for runs in (32, 96):
                    one = batch([17, 9, 30, 2], seed=runs, runs=runs, row_len=row_len)
                    with torch.set_grad_enabled(training):
                        sums = sums_of(model, one)
                    if training:
                        sums.loss.backward()
                counted.append(graphs())
    finally:
        torch.compiler.set_stance("default")
    assert counted == [6, 10, 10, 10, 16, 20, 20, 20]


def test_compiled_dropout_repeats_with_the_seed_and_under_checkpointing():
    """The masks are the compiler's own: the same again by the same seed, others than eager's."""
    once, checkpointed = (
        make(TINY.model_copy(update={"compile": True, "activation_checkpointing": c})).train()
        for c in (False, True)
    )
    one, found = batch([17, 9, 30, 2], seed=0), []
    with torch.random.fork_rng():
        for model, seed in ((once, 5), (once, 5), (checkpointed, 5), (once, 6)):
            torch.manual_seed(seed)
            found.append(gradients(model, one))
    for first, again, recomputed in zip(*found[:3], strict=True):
        assert torch.equal(first, again)
        torch.testing.assert_close(first, recomputed, rtol=1e-5, atol=1e-7)
    assert not torch.equal(found[0][0], found[3][0])
    # At 99 % dropped, what is left of the embeddings is scaled by 100.
    most = TINY.model_copy(update={"compile": True, "hidden_dropout_prob": 0.99})
    x = make(most).train().bert.embeddings(*(torch.zeros(4000, dtype=torch.int64),) * 3)
    assert abs((x != 0).double().mean() - 0.01) < 5 * (0.01 * 0.99 / x.numel()) ** 0.5


def test_compiled_bf16_errs_less_than_three_times_eager_bf16():
    one = batch([17, 9, 30, 2], seed=0)
    exact, reference, ours = (
        gradients(make(STILL.model_copy(update={"compile": c})).to(dtype), one)
        for c, dtype in ((False, torch.float32), (False, torch.bfloat16), (True, torch.bfloat16))
    )
    flat = [torch.cat([g.float().flatten() for g in found]) for found in (exact, reference, ours)]
    assert 0 < (flat[2] - flat[0]).norm() < 3 * (flat[1] - flat[0]).norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_is_written_over_the_logits_by_one_kernel(dtype):
    g = torch.Generator().manual_seed(0)
    exact = torch.randn(90, 500, generator=g) * 3
    labels = torch.randint(0, 500, (90,), generator=g)
    labels[::5] = IGNORE_INDEX
    nsp, nsp_labels = torch.zeros(1, 2), torch.tensor([IGNORE_INDEX])
    kernels, found = [], []
    exact.requires_grad_()
    F.cross_entropy(exact, labels, reduction="sum", ignore_index=IGNORE_INDEX).div(70).backward()
    for compiled in (True, False):
        leaf = exact.detach().to(dtype).requires_grad_()
        product = leaf * 1
        places = []
        product.register_hook(lambda grad, places=places: places.append(grad.data_ptr()))
        with fresh_cache():
            sums = pretraining_loss(product, labels, nsp, nsp_labels, 70, 1, compiled=compiled)
            metrics.reset()
            sums.loss.backward()
            kernels.append(metrics.generated_kernel_count)
        assert places == [product.data_ptr()]
        found.append((leaf.grad.float() - exact.grad).norm())
    assert kernels == [1, 0]
    assert found[0] < 3 * found[1] + 1e-7


def test_without_a_compiler_one_line_names_the_key():
    check_compiler(torch.device("cpu"))
    torch._dynamo.reset()
    nowhere = torch._inductor.config.patch({"cpp.cxx": (None, "/no/such/compiler")})
    with nowhere, pytest.raises(UserError, match="compile: .* does not work on cpu .*C") as error:
        check_compiler(torch.device("cpu"))
    assert "\n" not in str(error.value)
