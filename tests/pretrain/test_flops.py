"""Each kind of GPU is measured against its own peak."""

import pytest
import torch

from pretrain.flops import device_peak_tflops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA H100 NVL", 835.0),
        ("NVIDIA H200", 989.0),
        ("NVIDIA GH200 480GB", 989.0),
        ("NVIDIA B200", 2250.0),
        ("NVIDIA GB200", 2500.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("NVIDIA GeForce RTX 4090", 165.2),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_the_peak_of_a_device(
    monkeypatch: pytest.MonkeyPatch, name: str, peak: float | None
) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert device_peak_tflops(cuda, None) == peak
    assert device_peak_tflops(cuda, 700.0) == 700.0
    assert device_peak_tflops(torch.device("cpu"), None) is None
