"""LAMB in NumPy, float64, one tensor at a time: what every stage and world size must agree with.

Written from You et al. 2020 (arXiv 1904.00962, algorithm 2) and apex FusedLAMB's documented
behaviour: clip by the global norm, bias correction inside the update, decay inside the ratio,
ratio 1 without decay and for zero norms.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


class ReferenceLamb:
    def __init__(
        self,
        weights: Mapping[str, np.ndarray],
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        clip: float = 1.0,
        ratio_min: float = 0.0,
        ratio_max: float = np.inf,
    ) -> None:
        self.w = {name: np.array(w, dtype=np.float64) for name, w in weights.items()}
        self.m = {name: np.zeros_like(w) for name, w in self.w.items()}
        self.v = {name: np.zeros_like(w) for name, w in self.w.items()}
        self.t = 0
        self.beta1, self.beta2, self.eps = beta1, beta2, eps
        self.weight_decay, self.clip = weight_decay, clip
        self.ratio_min, self.ratio_max = ratio_min, ratio_max
        self.ratios: dict[str, float] = {}
        self.clipped = 0

    def step(self, gradients: Mapping[str, np.ndarray], lr: float) -> None:
        self.t += 1
        norm = np.sqrt(sum(float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()))
        self.clipped += norm > self.clip
        scale = self.clip / max(self.clip, norm) if self.clip > 0 else 1.0
        for name, w in self.w.items():
            g = gradients[name].astype(np.float64) * scale
            self.m[name] = self.beta1 * self.m[name] + (1 - self.beta1) * g
            self.v[name] = self.beta2 * self.v[name] + (1 - self.beta2) * g * g
            m_hat = self.m[name] / (1 - self.beta1**self.t)
            v_hat = self.v[name] / (1 - self.beta2**self.t)
            decay = self.weight_decay if w.ndim >= 2 else 0.0
            u = m_hat / (np.sqrt(v_hat) + self.eps) + decay * w
            w_norm, u_norm = np.linalg.norm(w), np.linalg.norm(u)
            ratio = w_norm / u_norm if decay > 0 and w_norm > 0 and u_norm > 0 else 1.0
            if decay > 0:
                ratio = min(max(ratio, self.ratio_min), self.ratio_max)
            self.ratios[name] = ratio
            w -= lr * ratio * u
