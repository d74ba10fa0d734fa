"""What TensorBoard shows of a run: a few folds in the order of what matters, a chart for each.

`metrics.jsonl` keeps everything, under its own names; what has no row here is in it alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from PIL import Image, ImageDraw

from configs.load import leaves
from pretrain.config import PretrainConfig

# Name of a record -> fold and name on the board.
TAGS = {
    "train/loss": "1_loss/all",
    "train/mlm_loss": "1_loss/masked_lm",
    "train/nsp_loss": "1_loss/next_sentence",
    "train/mlm_accuracy": "1_loss/masked_lm_accuracy",
    "train/nsp_accuracy": "1_loss/next_sentence_accuracy",
    "throughput/tokens_per_second": "2_speed/tokens_per_second",
    "throughput/mfu": "2_speed/mfu",
    "throughput/step_seconds": "2_speed/step_seconds",
    "throughput/padding_share": "2_speed/padding_share",
    "throughput/loader_wait_share": "2_speed/loader_wait_share",
    "throughput/overhead_share": "2_speed/overhead_share",
    "progress/tokens": "2_speed/tokens_so_far",
    "progress/epoch": "2_speed/epoch_of_phase",
    "train/grad_norm": "3_health/gradient_norm",
    "rate/learning_rate": "3_health/learning_rate",
    "rate/phase": "3_health/phase",
    "train/loss_scale": "3_health/loss_scale",
    "train/skipped_steps": "3_health/skipped_steps",
    "memory/device_peak_gb": "3_health/device_peak_gb",
    "memory/process_gb": "3_health/process_gb",
    "checkpoint/stall_seconds": "3_health/checkpoint_stall_seconds",
    "checkpoint/write_seconds": "3_health/checkpoint_write_seconds",
}
HELDOUT = {
    "heldout/mlm_loss": "masked_lm",
    "heldout/mlm_accuracy": "masked_lm_accuracy",
    "heldout/nsp_loss": "next_sentence",
    "heldout/nsp_accuracy": "next_sentence_accuracy",
    "heldout/frequencies_loss": "token_frequencies_loss",
    "heldout/commonest_accuracy": "commonest_token_accuracy",
}
CHARTS = {
    "a run": {
        "loss": [
            "Multiline",
            [r"1_loss/masked_lm$", r"heldout_\d+/(masked_lm|token_frequencies_loss)$"],
        ],
        "words right": [
            "Multiline",
            [r"1_loss/masked_lm_accuracy$", r"heldout_\d+/masked_lm_accuracy$"],
        ],
        "speed": ["Multiline", [r"2_speed/tokens_per_second$"]],
        "health": ["Multiline", [r"3_health/gradient_norm$", r"3_health/trust_ratio_p\d+$"]],
    }
}
# Settings of a run in the table of runs.
_SETTINGS = (
    "seed", "objective", "data.masked_lm_prob", "data.next_sentence", "data.whole_word_mask",
    "model.hidden_size", "model.num_hidden_layers", "model.num_attention_heads",
    "model.intermediate_size", "model.hidden_dropout_prob", "optimizer.name", "optimizer.beta2",
    "optimizer.weight_decay", "engine.gradient_clipping",
)  # fmt: skip
_OF_A_PHASE = ("max_seq_len", "steps", "sequences_per_step", "learning_rate", "warmup", "decay")
_QUANTILES = (5, 50, 95)  # per cent


def scalars(values: Mapping[str, float | None], length: int = 0) -> dict[str, float | None]:
    """The board's tags of records; `length`: of the sequences that an evaluation had, at most."""
    shown = {TAGS[name]: value for name, value in values.items() if name in TAGS}
    for name, value in values.items():
        parts = name.split("/")
        if (tag := HELDOUT.get(f"{parts[0]}/{parts[-1]}")) is not None:
            shown["/".join([f"heldout_{length}", *parts[1:-1], tag])] = value  # between: a source
    return shown


def settings(config: PretrainConfig) -> tuple[dict[str, bool | float | str], list[str]]:
    """What sweeps vary, by key, and the tags of the numbers that tell runs apart."""
    found = leaves(config.model_dump(mode="json"))
    keys = [
        *_SETTINGS,
        *(f"phases.{i}.{k}" for i in range(len(config.phases)) for k in _OF_A_PHASE),
    ]
    lengths = sorted({phase.max_seq_len for phase in config.phases})
    tags = [f"heldout_{n}/{tag}" for n in lengths for tag in ("masked_lm", "masked_lm_accuracy")]
    return {key: found[key] for key in keys}, [*tags, "1_loss/masked_lm", "2_speed/tokens_so_far"]


def trust_scalars(ratios: Mapping[tuple[str, str], float]) -> dict[str, float | None]:
    """Quantiles of LAMB's trust ratios over the tensors."""
    found = np.percentile(list(ratios.values()), _QUANTILES)
    return {
        f"3_health/trust_ratio_p{q:02}": float(v) for q, v in zip(_QUANTILES, found, strict=True)
    }


def is_matrix(kind: str) -> bool:
    """Whether a kind of parameter (`optim.layer_and_kind`) is no bias and of no LayerNorm."""
    return kind.endswith("weight") and "LayerNorm" not in kind


def heat_map(values: Mapping[tuple[str, str], float], cell: int = 26) -> np.ndarray:
    """A picture of positive values by (row, column), uint8 [H, W, 3]: from blue, the least, to
    yellow, the most, by the logarithm; both are written below. cell: pixels."""
    rows, columns = ([*dict.fromkeys(key[i] for key in values)] for i in (0, 1))
    logs = {key: np.log(max(value, 1e-12)) for key, value in values.items()}
    least, most = min(logs.values()), max(logs.values())
    left = 7 * max(map(len, rows)) + 8
    names = [f"{i + 1}: {name}" for i, name in enumerate(columns)]
    below = [*names, f"{np.exp(least):.2g} (blue) to {np.exp(most):.2g} (yellow)"]
    width = max(left + cell * len(columns), 7 * max(map(len, below)) + 8)
    top = 16
    picture = Image.new("RGB", (width, top + cell * len(rows) + 14 * len(below) + 8), "white")
    draw = ImageDraw.Draw(picture)
    for i in range(len(columns)):
        draw.text((left + cell * i + 8, 2), str(i + 1), fill="black")
    for j, row in enumerate(rows):
        draw.text((4, top + cell * j + 7), row, fill="black")
        for i, column in enumerate(columns):
            if (row, column) in logs:
                share = (logs[row, column] - least) / max(most - least, 1e-12)
                colour = round(30 + 220 * share), round(40 + 170 * share), round(110 - 70 * share)
                x, y = left + cell * i, top + cell * j
                draw.rectangle((x, y, x + cell - 2, y + cell - 2), fill=colour)
    for i, line in enumerate(below):
        draw.text((4, top + cell * len(rows) + 6 + 14 * i), line, fill="black")
    return np.asarray(picture)
