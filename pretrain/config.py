"""The tree of a pretraining run: each section is defined beside the code that it configures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from configs.load import Config, LocalPath, load
from data_pipeline.stream.plan import OBJECTIVE, SEED, ObjectiveName, PhaseSpec, StreamConfig
from pretrain.engine_config import EngineConfig
from pretrain.model_config import ModelConfig
from pretrain.optim_config import OptimizerConfig
from pretrain.origin import with_shape_of_origin
from pretrain.schedule import ScheduleConfig


class PhaseConfig(PhaseSpec, ScheduleConfig):
    """One phase: its sequences (PhaseSpec), its rates (ScheduleConfig) and its length."""

    steps: int = Field(ge=1, description="optimiser steps of the phase")
    micro_batch_rows: int = Field(
        ge=1,
        description="most packed rows a rank computes at once; the largest number up to it that "
        "divides the rank's rows of a step is taken, and accumulation follows",
    )


class CheckpointConfig(Config):
    every_steps: int = Field(500, ge=1, description="optimiser steps between checkpoints")
    keep_last: int = Field(3, ge=1, description="newest checkpoints to keep")
    keep_every: int = Field(
        0, ge=0, description="also keep each checkpoint whose step is a multiple of this; 0: none"
    )
    max_failed_writes: int = Field(
        3, ge=0, description="checkpoints in a row that may fail to be written before the run stops"
    )
    max_total_gb: float = Field(
        0,
        ge=0,
        description="of all complete checkpoints; the oldest go first, never the newest; 0: no "
        "bound. The one being written comes on top",
    )
    max_rollbacks: int = Field(
        3,
        ge=0,
        description="times in a run to go back to the last checkpoint and leave out the batches of "
        "engine.max_skipped_steps bad steps in a row",
    )
    asynchronous: bool = Field(
        True, description="write in the background, from a copy in host memory"
    )


class EvaluationConfig(Config):
    every_steps: int = Field(500, ge=0, description="optimiser steps between evaluations; 0: off")
    rows: int = Field(
        64, ge=1, description="packed rows of held-out text to evaluate on, of each length"
    )
    every_length: bool = Field(
        True,
        description="evaluate on sequences of every phase's length at each evaluation; false: of "
        "the phase's own alone",
    )
    sentences: int = Field(
        5, ge=0, le=100, description="held-out sentences with a blank to fill in at each; 0: none"
    )


class LoggingConfig(Config):
    every_steps: int = Field(
        10, ge=1, description="optimiser steps between points in TensorBoard and metrics.jsonl"
    )
    peak_tflops: float | None = Field(
        None,
        gt=0,
        description="matmul peak of one device in TFLOP/s for the MFU; null: known GPUs, else none",
    )
    trackers: tuple[Literal["wandb", "mlflow"], ...] = Field(
        (),
        description="what else gets TensorBoard's numbers: wandb, mlflow; offline, in the run "
        "folder, unless WANDB_MODE or MLFLOW_TRACKING_URI say otherwise",
    )


class PretrainConfig(Config):
    run_dir: LocalPath = Field(description="folder of checkpoints, logs and TensorBoard events")
    seed: int = SEED
    device: Literal["auto", "cuda", "cpu"] = Field(
        "auto", description="auto: a GPU where there is one, else the CPU"
    )
    threads: int = Field(
        0,
        ge=0,
        le=1024,
        description="CPU threads of a process; 0: the cores it may use / processes that share them",
    )
    watchdog_seconds: float = Field(
        600,
        ge=0,
        le=10**6,
        description="seconds without progress of a rank until it is named and the run ends with "
        "exit code 85; 2.5 times that for the start, a first step, a checkpoint; 0: off, where a "
        "killed rank ends the others with 1 and gloo's traceback, and no rank misses its launcher "
        "once all have met",
    )
    init_from: LocalPath | None = Field(
        None,
        description="a run, a checkpoint or a Hugging Face folder to start from, when the run has "
        "no checkpoint; of the data set's vocabulary and casing. `model:` is filled in from it",
    )
    objective: ObjectiveName = OBJECTIVE
    data: StreamConfig = Field(description="shards and how they become sequences")
    model: ModelConfig = Field(default_factory=ModelConfig, description="the shape of BERT")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="LAMB or AdamW")
    engine: EngineConfig = Field(
        default_factory=EngineConfig, description="ZeRO, precision, clipping, DeepSpeed's own keys"
    )
    phases: tuple[PhaseConfig, ...] = Field(min_length=1, description="in order, in one job")
    checkpoint: CheckpointConfig = Field(
        default_factory=CheckpointConfig, description="when to write and what to keep"
    )
    evaluation: EvaluationConfig = Field(
        default_factory=EvaluationConfig, description="masked LM and next sentence on held-out text"
    )
    logging: LoggingConfig = Field(default_factory=LoggingConfig, description="what is shown")

    @model_validator(mode="before")
    @classmethod
    def _ledger_in_run_dir(cls, tree: Any) -> Any:
        match tree:
            case {"run_dir": str(folder), "data": {**data}} if data.get("ledger") is None:
                return {**tree, "data": data | {"ledger": str(Path(folder) / "damaged.jsonl")}}
        return tree

    @model_validator(mode="before")
    @classmethod
    def _mask_of_the_objective(cls, tree: Any) -> Any:
        match tree:
            case {"objective": "left_to_right"}:
                model = tree.get("model") or {}
                if isinstance(model, dict):
                    return {**tree, "model": {"is_decoder": True} | model}
        return tree

    @model_validator(mode="after")
    def _fits(self) -> PretrainConfig:
        self.data.objective(self.objective)
        if 0 < self.watchdog_seconds < 1:
            raise ValueError(
                f"watchdog_seconds: {self.watchdog_seconds:g} is neither 0 nor 1 or more"
            )
        if self.model.is_decoder != (self.objective == "left_to_right"):
            raise ValueError(f"model.is_decoder: follows from objective, which is {self.objective}")
        if self.model.type_vocab_size < 2 and self.data.paired:
            raise ValueError(
                "model.type_vocab_size: 1, but the two segments of data.next_sentence: "
                f"{self.data.next_sentence} take two types; none takes one"
            )
        for i, phase in enumerate(self.phases):
            limit = self.model.max_position_embeddings
            if phase.max_seq_len > limit:
                raise ValueError(
                    f"phases.{i}.max_seq_len: {phase.max_seq_len} is more than "
                    f"model.max_position_embeddings: {limit}"
                )
        return self

    @property
    def total_steps(self) -> int:
        return sum(phase.steps for phase in self.phases)


def load_run(path: str | Path, overrides: Sequence[str] = ()) -> PretrainConfig:
    """The configuration of a run that is to be started: what `model:` leaves open is as in the
    folder of `init_from`."""
    return load(path, PretrainConfig, overrides, with_shape_of_origin)
