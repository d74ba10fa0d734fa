"""For a machine with a GPU: the whole step there, without host synchronisation."""

import pytest
import torch

from pretrain.loss import pretraining_loss
from pretrain.stopwatch import PARTS, Stopwatch
from tests.pretrain.packing import STILL, TINY
from tests.pretrain.test_model import batch, make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPE = {"hidden_size": 64, "num_attention_heads": 2}


def loss_of(model, device):
    _, _, packed, positions, labels, cls_positions, nsp_labels = batch()
    moved = [t.to(device) if isinstance(t, torch.Tensor) else t for t in packed]
    rest = [t.to(device) for t in (positions, labels, cls_positions, nsp_labels)]

    def step() -> torch.Tensor:
        mlm, nsp = model(*moved, rest[0], rest[2])
        loss = pretraining_loss(mlm, rest[1], nsp, rest[3], 10, 5).loss
        loss.backward()
        return loss.detach()

    return step


@pytest.mark.parametrize("compiled", [False, True])
def test_a_step_does_not_wait_for_the_host(compiled):
    config = TINY.model_copy(update=SHAPE | {"compile": compiled})
    step = loss_of(make(config).cuda().bfloat16().train(), "cuda")
    step()  # compiles, allocates
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_parts_are_timed_without_a_wait_and_add_up():
    watch = Stopwatch(torch.device("cuda"))
    x = torch.randn(2048, 2048, device="cuda")
    whole = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        whole[0].record()
        for part in PARTS:
            watch.switch(part)
            x = (x @ x).tanh()
        watch.switch("")
        whole[1].record()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    seconds = watch.read()
    assert min(seconds.values()) > 0
    torch.cuda.synchronize()
    assert sum(seconds.values()) <= whole[0].elapsed_time(whole[1]) / 1e3 + 1e-5


@pytest.mark.parametrize("path", ["varlen", "sdpa"])
def test_bf16_loss_and_gradients_err_less_than_three_times_the_cpus(path):
    # All three on the CPU path's weights: fp32, bf16 on the CPU (the reference), bf16 on the GPU.
    results = []
    for device, dtype, attention in (
        ("cpu", torch.float32, "sdpa"),
        ("cpu", torch.bfloat16, "sdpa"),
        ("cuda", torch.bfloat16, path),
    ):
        model = make(STILL.model_copy(update=SHAPE | {"attention": attention}))
        model = model.to(device, dtype).eval()
        loss = loss_of(model, device)()
        flat = torch.cat([p.grad.flatten().float().cpu() for p in model.parameters()])
        results.append((float(loss), flat))
    (exact, g0), (reference, g1), (ours, g2) = results
    assert abs(ours - exact) < 3 * max(abs(reference - exact), 1e-3)
    assert (g2 - g0).norm() < 3 * (g1 - g0).norm()
