"""Peaks of devices: what the share of the peak that is reached (MFU) is measured against."""

from __future__ import annotations

import torch

# Dense bf16 matmul peaks in TFLOP/s by a part of the device's name, from NVIDIA's data sheets,
# without sparsity; the first that fits counts.
PEAK_TFLOPS = {
    "A100": 312.0,
    "H100 PCIe": 756.0,
    "H100 NVL": 835.0,
    "H100": 989.0,
    "H200 NVL": 835.0,
    "H200": 989.0,
    "V100": 125.0,
    "B200": 2250.0,
}


def device_peak_tflops(device: torch.device, configured: float | None) -> float | None:
    """The matmul peak of one device: `configured`, else the table's; None where it is not known."""
    if configured is not None or device.type != "cuda":
        return configured
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAK_TFLOPS.items() if known in name), None)
