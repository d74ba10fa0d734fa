"""Model FLOPs of training, and the peaks of devices: their ratio over time is the MFU."""

from __future__ import annotations

import re

import torch

from pretrain.model_config import ModelConfig

CPU = "cpu"  # its name in PEAK_TFLOPS
# Dense bf16 matmul peaks in TFLOP/s (V100: fp16) by a part of the device's name, from NVIDIA's data
# sheets, without sparsity; the first that fits counts. A CPU's is of one core, for plans: two AVX2
# units of 8 fp32 multiply-adds at 2.5 GHz.
PEAK_TFLOPS = {
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "GH200": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "V100": 125.0,
    "GB200": 2500.0,
    "B200": 2250.0,
    "L40S": 362.0,
    "RTX 4090": 165.2,
    "RTX 3090": 71.0,
    CPU: 0.08,
}


def device_peak_tflops(device: torch.device, configured: float | None) -> float | None:
    """The matmul peak of one device: `configured`, else the table's; None where it is not known, as
    of CPUs."""
    if configured is not None or device.type != "cuda":
        return configured
    return PEAK_TFLOPS.get(known_as(device) or "")


def known_as(device: torch.device) -> str | None:
    """Its name in `PEAK_TFLOPS`. A Ti, a D or a laptop's is another device than its namesake."""
    if device.type != "cuda":
        return CPU
    name = torch.cuda.get_device_name(device)
    fits = (k for k in PEAK_TFLOPS if re.search(rf"\b{k}\b(?! (?:Ti|D|Laptop)\b)", name))
    return next(fits, None)


def training_flops(
    config: ModelConfig,
    tokens: float,
    predictions: float,
    sequences: float,
    sum_of_squared_lengths: float | None = None,
    *,
    next_sentence: bool = True,
) -> float:
    """Model FLOPs of training on so many real tokens: matrix products, forward and backward.

    Two a multiply-add; backward is twice forward; padding, recomputation, softmax and LayerNorm
    count nothing. The language-model head counts at `predictions` positions, the pooler once a
    sequence where next sentence is a task, attention by the squares of the sequences' lengths
    (None: all equally long), under a causal mask by the pairs that it leaves.
    """
    D, F, V = config.hidden_size, config.intermediate_size, config.vocab_size
    squares = sum_of_squared_lengths
    if squares is None:
        squares = tokens * tokens / sequences if sequences else 0.0
    # Under a causal mask token i of a sequence has i partners, else all of them.
    pairs = (squares + tokens) / 2 if config.is_decoder else squares
    layer = tokens * (4 * D * D + 2 * D * F) + 2 * pairs * D
    heads = predictions * (D * D + D * V)
    if next_sentence:
        heads += sequences * (D * D + 2 * D)
    return 3.0 * 2.0 * (config.num_hidden_layers * layer + heads)
