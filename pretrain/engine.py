"""One optimiser step over its micro-batches, on DeepSpeed.

The loss of each micro-batch is its sums over the counts of the whole step, so the parts add up to
the global mean over all ranks and micro-steps. DeepSpeed averages gradients over the ranks, hence
the factor `world` on the loss, and it is told not to divide by the accumulation.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import math
import shutil
import socket
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.errors import UserError
from data_pipeline.stream.batch import Batch
from pretrain import deepspeed_door
from pretrain.engine_config import EngineConfig
from pretrain.engine_files import (
    FORMAT,
    META,
    MODEL_FILE,
    on_host,
    read_meta,
    read_tree,
    shard_name,
    stage_0_reader,
    universal_reader,
    write_tree,
)
from pretrain.evaluate import Scores, batch_losses, scores_of, sums
from pretrain.loss import LossSums
from pretrain.numerics import resolve_precision
from pretrain.optim import (
    Lamb,
    OptimizerConfig,
    TrustRatio,
    build_optimizer,
    restart_bias_correction,
)
from pretrain.stopwatch import Stopwatch

# What moves in DeepSpeed's dynamic loss scaler.
MOMENTS = ("exp_avg", "exp_avg_sq")
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(frozen=True)
class StepOutcome:
    """One optimiser step, the same on every rank: losses are global means in nats.

    skipped: the gradients were not finite, the weights and moments stand as they were.
    grad_norm: global norm before clipping; inf when skipped. trust: LAMB's trust ratios by
    parameter, every `engine.trust_ratios_every` steps, else None. seconds: this rank's, by part
    (`stopwatch.PARTS`); `reduce` is what backward's own work does not hide.
    """

    loss: float
    mlm_loss: float
    nsp_loss: float
    mlm_accuracy: float
    nsp_accuracy: float
    grad_norm: float
    skipped: bool
    loss_scale: float
    trust: dict[str, TrustRatio] | None = None
    seconds: dict[str, float] = field(default_factory=dict, compare=False)

    @property
    def bad(self) -> bool:
        """A step that taught nothing; some are normal while fp16 finds its loss scale."""
        return self.skipped or not math.isfinite(self.loss)


class Engine:
    """Model, optimiser and DeepSpeed of one rank. All public methods are collective.

    `torch.distributed` must be initialised, and the model on its device, in fp32.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer_config: OptimizerConfig,
        engine_config: EngineConfig,
        *,
        micro_steps: int,
        micro_batch_rows: int,
    ) -> None:
        self.config = engine_config
        self.device = next(model.parameters()).device
        self.precision = resolve_precision(engine_config, self.device)
        self.world = dist.get_world_size()
        self.rank = dist.get_rank()
        self.micro_steps = micro_steps
        self._restarts = optimizer_config.restart_bias_correction
        self._names = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
        self.optimizer = build_optimizer(model, optimizer_config)
        self._group_parameters = [list(g["params"]) for g in self.optimizer.param_groups]
        self._hyper = [
            {k: v for k, v in g.items() if k not in ("params", "param_names", "lr")}
            for g in self.optimizer.param_groups
        ]
        self._deepspeed_json = self._json(micro_steps, micro_batch_rows)
        initial = {} if self.precision == "fp32" else _copied(model)
        self._ds = deepspeed_door.initialize(model, self.optimizer, self._deepspeed_json)
        if isinstance(self.optimizer, Lamb):
            self.optimizer.attach(self.device)
        self._make_states()
        if initial:
            # DeepSpeed makes the fp32 masters from weights it has already rounded.
            self.load_weights(initial)
        self._steps = 0
        self._watch = Stopwatch(self.device)
        deepspeed_door.time_reductions(self._ds, functools.partial(self._watch.timed, "reduce"))

    @property
    def module(self) -> nn.Module:
        return self._ds.module

    @property
    def wrapper(self) -> str:
        """DeepSpeed's class around the optimiser; the optimiser's own at stage 0."""
        return type(self._ds.optimizer).__name__

    @property
    def loss_scale(self) -> float:
        return float(getattr(self._ds.optimizer, "loss_scale", 1.0))

    def start_phase(
        self, micro_steps: int, micro_batch_rows: int, *, restart: bool = False
    ) -> None:
        """Another accumulation from here on. `restart`: a phase begins, so bias correction counts
        from 0 if `optimizer.restart_bias_correction` says so. Moments and loss scale are kept.
        """
        self.micro_steps = micro_steps
        self._ds.set_train_micro_batch_size(micro_batch_rows)
        self._ds.set_train_batch_size(micro_batch_rows * micro_steps * self.world)
        if self.config.zero_stage > 0:
            self._ds.optimizer.gradient_accumulation_steps = micro_steps
        if restart and self._restarts:
            restart_bias_correction(self.optimizer)

    def train_step(self, batches: Iterator[Batch], lr: float) -> StepOutcome:
        """Take `micro_steps` batches and make one update at the rate `lr`."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self._ds.train()
        total = torch.zeros(5, dtype=torch.float64, device=self.device)
        for micro_step in range(self.micro_steps):
            self._watch.switch("data")
            batch = next(batches).to(self.device, non_blocking=True)
            self._watch.switch("forward")
            self._ds.set_gradient_accumulation_boundary(micro_step == self.micro_steps - 1)
            found = self._forward(batch, batch.step_predictions, batch.step_sequences)
            total += torch.stack([x.detach().double() for x in found])
            self._watch.switch("backward")
            self._ds.backward(found.loss * self.world, scale_wrt_gas=False)
        self._watch.switch("update")
        predictions, sequences = max(batch.step_predictions, 1), max(batch.step_sequences, 1)
        loss_scale = self.loss_scale
        grad_norm, skipped = self._update()
        self._watch.switch("")
        if self.world > 1:
            dist.all_reduce(total)
        loss, mlm_sum, nsp_sum, mlm_correct, nsp_correct = total.tolist()
        self._steps += 1
        every = self.config.trust_ratios_every
        due = isinstance(self.optimizer, Lamb) and every > 0 and self._steps % every == 0
        return StepOutcome(
            loss=loss,
            mlm_loss=mlm_sum / predictions,
            nsp_loss=nsp_sum / sequences,
            mlm_accuracy=mlm_correct / predictions,
            nsp_accuracy=nsp_correct / sequences,
            grad_norm=grad_norm,
            skipped=skipped,
            loss_scale=loss_scale,
            trust=self.optimizer.trust_ratios() if due and not skipped else None,
            seconds=self._watch.read(),
        )

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Batch]) -> Scores:
        """Means over the batches of all ranks, without dropout."""
        was_training = self.module.training
        self._ds.eval()
        total = sums(self._ds, batches, self.device)
        if self.world > 1:
            dist.all_reduce(total)
        self._ds.train(was_training)
        return scores_of(total)

    # ------------------------------------------------------------------------------ one step

    def _forward(self, batch: Batch, predictions: int, sequences: int) -> LossSums:
        return batch_losses(self._ds, batch, predictions, sequences)

    def _update(self) -> tuple[float, bool]:
        """Clip and step: (global gradient norm, skipped)."""
        if self.config.zero_stage == 0:
            # Without ZeRO DeepSpeed neither reports the norm nor checks for overflow.
            parameters = [p for ps in self._group_parameters for p in ps if p.grad is not None]
            norm = nn.utils.get_total_norm([p.grad for p in parameters])
            if not torch.isfinite(norm):
                self._ds.zero_grad()
                return math.inf, True
            if self.config.gradient_clipping > 0:
                nn.utils.clip_grads_with_norm_(parameters, self.config.gradient_clipping, norm)
            self._ds.step()
            return float(norm), False
        self._ds.step()
        skipped = not self._ds.was_step_applied()
        norm = self._ds.get_global_grad_norm()
        return math.inf if skipped or norm is None else float(norm), skipped

    # --------------------------------------------------------------------------------- start

    def _json(self, micro_steps: int, micro_batch_rows: int) -> dict[str, Any]:
        config, stage = self.config, self.config.zero_stage
        clip = config.gradient_clipping if stage > 0 else 0.0
        numel = sum(p.numel() for ps in self._group_parameters for p in ps)
        # Below what `deepspeed:` says; DeepSpeed's bucket of 5e8 elements is 2 GB for any model.
        # Its throughput timer makes a GPU's host wait twice a micro-step.
        defaults: dict[str, Any] = {"timers": {"throughput": {"enabled": False}}}
        ours: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": micro_batch_rows,
            "gradient_accumulation_steps": micro_steps,
            "gradient_clipping": clip,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
        }
        if stage > 0:
            # overlap_comm at stage 1: the last micro-step's backward sends what is ready.
            # Several buckets, or there is nothing to send before the end of backward; but each
            # has its latency (between two CPU ranks eight small ones cost a fifth of a step).
            bucket = min(numel, max(-(-numel // 8), 10_000_000), 50_000_000)
            defaults["zero_optimization"] = {"reduce_bucket_size": bucket, "overlap_comm": True}
            ours["zero_optimization"] = {"stage": stage}
        if self.precision != "fp32":
            ours[self.precision] = {"enabled": True}
            # Sums over many micro-steps and ranks lose what 8 or 11 bits cannot hold.
            ours["data_types"] = {"grad_accum_dtype": "fp32"}
            defaults["communication_data_type"] = "fp32"
        return _merged(_merged(defaults, config.deepspeed), ours)

    def _make_states(self) -> None:
        """Moments before the first step, so that memory runs out now and not later."""
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                self.optimizer.state[p] = {
                    "step": torch.zeros((), dtype=torch.float32, device=p.device),
                    "exp_avg": torch.zeros_like(p, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(p, requires_grad=False),
                }

    # --------------------------------------------------------------------------- save, load

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Start from these weights (fp32, by name); moments and counters stay as they are.

        UserError unless names and shapes are exactly the model's. Tied names may be left out.
        """
        _check_names(weights, self.module, "the weights to start from")
        self._write_parameters(lambda name, key: weights[name] if key == "fp32" else None)
        self._load_rest(weights)

    def not_finite(self) -> str | None:
        """The first of this rank's fp32 weights and moments with a NaN or an infinity in it; None
        if all are finite. No collective."""
        names, largest = [], []
        for group, parameters in zip(
            self.optimizer.param_groups, self._group_parameters, strict=True
        ):
            for index, parameter in enumerate(parameters):
                _, numel, here, p = self._place(group, index, parameter)
                state = self.optimizer.state[p]
                for key, tensor in ("weights", p), *((k, state[k]) for k in MOMENTS):
                    if numel:
                        piece = tensor.detach().flatten()[here : here + numel]
                        names.append(f"{self._names[id(parameter)]} ({key})")
                        largest.append(torch.linalg.vector_norm(piece, math.inf))
        found = torch.stack(largest).isfinite().tolist() if largest else []
        return next((name for name, good in zip(names, found, strict=True) if not good), None)

    def save(self, folder: Path) -> None:
        """Write this rank's files into an existing folder. No collective, so a rank that fails
        leaves nobody waiting; the folder is complete once every rank has returned.

        The files are DeepSpeed's own, by name and content, so its tools read them too.
        """
        self.snapshot()(folder)

    def snapshot(self) -> Callable[[Path], list[str]]:
        """Copy this rank's state to host memory. What is returned writes it into a folder, from
        any thread and whatever has become of the engine, and gives the names of the files.

        Costs as much host memory as the files are long, until the function is let go.
        """
        copies: dict[int, Any] = {}
        files = {name: on_host(tree, copies) for name, tree in self._files().items()}
        meta = json.dumps(self._meta(), indent=1) if self.rank == 0 else None

        def write(folder: Path) -> list[str]:
            for name, tree in files.items():
                write_tree(tree, folder / name)
            if meta is None:
                return list(files)
            (folder / META).write_text(meta, encoding="utf-8")
            return [*files, META]

        return write

    def _files(self) -> dict[str, Any]:
        """What this rank writes, by name of the file; tensors are the live ones."""
        zero, files = self.config.zero_stage > 0, {}
        if zero:
            state = self._ds.optimizer.state_dict()
            # Plain types only, so that reading needs no unpickling of classes.
            state.pop("loss_scaler", None)
            state["zero_stage"] = self.config.zero_stage
            shard = {"optimizer_state_dict": state, "ds_version": _version()}
            files[shard_name(self.precision, self.rank)] = shard
        if self.rank == 0:
            files[MODEL_FILE] = {
                "module": self.module.state_dict(),
                "optimizer": None if zero else self._stage_0_state(),
                "param_shapes": self._shapes(),
                "dp_world_size": self.world,
                "mp_world_size": 1,
                "ds_version": _version(),
                "iteration": self._steps,
                "universal_checkpoint_info": {"universal_checkpoint_version": 0.2},
                "engine": {"steps": self._steps},
                "loss_scaler": self._scaler_state(),
            }
        return files

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote: bitwise at the same world size, stage and precision; else
        through DeepSpeed's universal format, converted once a node into a temporary folder.
        """
        folder = Path(folder)
        meta = read_meta(folder)
        model = read_tree(folder / MODEL_FILE)
        _check_names(model["module"], self.module, str(folder))
        if meta == self._meta():
            self.module.load_state_dict(model["module"])
            if self.config.zero_stage > 0:
                shard = read_tree(folder / shard_name(self.precision, self.rank))[
                    "optimizer_state_dict"
                ]
                with deepspeed_door.quiet():
                    self._ds.optimizer.load_state_dict(
                        [shard] * self.world,
                        load_optimizer_states=True,
                        load_from_fp32_weights=True,
                    )
            else:
                self._load_stage_0(model["optimizer"])
        else:
            self._load_universal(folder, model)
        self._restore_config()
        self._load_scaler(model["loss_scaler"])
        self._steps = model["engine"]["steps"]

    def _restore_config(self) -> None:
        """What this run's config says stands above what the checkpoint's optimiser was told."""
        for group, before in zip(self.optimizer.param_groups, self._hyper, strict=True):
            group.update(before)
        if self.config.zero_stage > 0:
            self._ds.optimizer.clip_grad = self.config.gradient_clipping

    def _scaler_state(self) -> dict[str, Any]:
        scaler = getattr(self._ds.optimizer, "loss_scaler", None)
        return {key: getattr(scaler, key) for key in _SCALER if hasattr(scaler, key)}

    def _load_scaler(self, saved: dict[str, Any]) -> None:
        scaler = getattr(self._ds.optimizer, "loss_scaler", None)
        if self.precision == "fp16" and len(saved) == len(_SCALER):
            for key, value in saved.items():
                setattr(scaler, key, value)

    def _meta(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "world_size": self.world,
            "zero_stage": self.config.zero_stage,
            "precision": self.precision,
            "wrapper": self.wrapper,
        }

    def _shapes(self) -> list[dict[str, torch.Size]]:
        return [
            {self._names[id(p)]: p.shape for p in parameters}
            for parameters in self._group_parameters
        ]

    def _stage_0_state(self) -> dict[str, Any]:
        masters = {
            self._names[id(parameter)]: master.detach()
            for group, parameters in zip(
                self.optimizer.param_groups, self._group_parameters, strict=True
            )
            for parameter, master in zip(parameters, group["params"], strict=True)
        }
        return {"fp32": masters, "state": self.optimizer.state_dict()}

    def _load_stage_0(self, saved: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(saved["state"])
        self._write_parameters(lambda name, key: saved["fp32"][name] if key == "fp32" else None)

    def _load_universal(self, folder: Path, model: dict[str, Any]) -> None:
        self.module.load_state_dict(model["module"])
        if model["optimizer"] is not None:
            self._write_parameters(stage_0_reader(model))
            return
        hosts: list[Any] = [None] * self.world
        dist.all_gather_object(hosts, socket.gethostname())
        leader = hosts.index(hosts[self.rank])
        temporary, problem = None, None
        if leader == self.rank:
            try:
                temporary = tempfile.mkdtemp(prefix="universal-")
                _convert(folder, Path(temporary))
            except Exception as error:  # every rank must learn of it, or the others wait for ever
                problem = f"{folder}: cannot be converted to another world size: {error}"
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, (temporary, problem))
        try:
            problems = [text for _, text in found if text]
            if problems:
                raise UserError(problems[0])
            self._write_parameters(universal_reader(Path(found[leader][0])))
            dist.barrier()
        finally:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)

    def _write_parameters(self, read: Any) -> None:
        """Fill master weights and states from `read(name, key)`; None leaves a tensor as it is.

        Keys are `fp32`, `exp_avg`, `exp_avg_sq` and `step`; tensors come whole and each rank
        takes the pieces of its own slice.
        """
        for group, parameters in zip(
            self.optimizer.param_groups, self._group_parameters, strict=True
        ):
            step = read(self._names[id(parameters[0])], "step")
            if step is not None:
                for p in group["params"]:
                    self.optimizer.state[p]["step"].fill_(float(step))
            for index, parameter in enumerate(parameters):
                name = self._names[id(parameter)]
                start, numel, here, p = self._place(group, index, parameter)
                if numel == 0:
                    continue
                for key in ("fp32", "exp_avg", "exp_avg_sq"):
                    value = read(name, key)
                    if value is None:
                        continue
                    if value.numel() != parameter.numel():
                        raise UserError(f"{name}: {key} has {value.numel()} elements, not "
                                        f"{parameter.numel()}")  # fmt: skip
                    target = p if key == "fp32" else self.optimizer.state[p][key]
                    piece = value.flatten()[start : start + numel]
                    target.detach().view(-1)[here : here + numel].copy_(piece)
        if self.config.zero_stage > 0:
            self._ds.optimizer.update_lp_params()
            return
        for group, parameters in zip(
            self.optimizer.param_groups, self._group_parameters, strict=True
        ):
            for parameter, p in zip(parameters, group["params"], strict=True):
                parameter.data.copy_(p.data)

    def _place(
        self, group: dict[str, Any], index: int, parameter: Tensor
    ) -> tuple[int, int, int, Tensor]:
        """(first element of the piece in the tensor, elements, first in the slice, slice)."""
        if self.config.zero_stage == 0:
            return 0, parameter.numel(), 0, group["params"][index]
        mapping = parameter._hp_mapping
        if mapping is None:
            return 0, 0, 0, group["params"][0]
        here = mapping.get_hp_fragment_address()
        return mapping.lp_fragment_address.start, here.numel, here.start, group["params"][0]

    def _load_rest(self, weights: Mapping[str, Tensor]) -> None:
        """Buffers and frozen parameters, which no optimiser state covers."""
        trainable = set(self._names)
        own = dict(self.module.named_parameters(remove_duplicate=False))
        own |= dict(self.module.named_buffers())
        with torch.no_grad():
            for name, value in weights.items():
                if name in own and id(own[name]) not in trainable:
                    own[name].copy_(value)


def _convert(folder: Path, temporary: Path) -> None:
    """DeepSpeed's own converter, in this process, without its chatter."""
    ds_to_universal = deepspeed_door.universal_converter()

    for path in sorted(folder.glob("*.pt")):
        read_tree(path)  # the converter unpickles anything; what passes here holds tensors only
    arguments = types.SimpleNamespace(
        input_folder=str(folder),
        output_folder=str(temporary / "universal"),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    with deepspeed_door.quiet():
        ds_to_universal.main(arguments)


def _check_names(weights: Mapping[str, Tensor], module: nn.Module, where: str) -> None:
    """UserError unless `weights` has exactly the module's names and shapes (tied ones may lack)."""
    own = module.state_dict(keep_vars=True)
    given = {id(own[name]) for name in weights if name in own}
    missing = [
        name for name, value in own.items() if name not in weights and id(value) not in given
    ]
    unexpected = [name for name in weights if name not in own]
    if missing or unexpected:
        raise UserError(
            f"{where}: does not fit the model: missing {_first(missing)}; "
            f"unexpected {_first(unexpected)}"
        )
    for name, value in weights.items():
        if value.shape != own[name].shape:
            raise UserError(
                f"{where}: {name} has shape {list(value.shape)}, the model's is "
                f"{list(own[name].shape)}"
            )


def _first(names: list[str]) -> str:
    more = [f"{len(names) - 3} more"] if len(names) > 3 else []
    return ", ".join(names[:3] + more) or "nothing"


def _copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def _version() -> str:
    return importlib.metadata.version("deepspeed")


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """`second` laid over `first`, section by section."""
    result = dict(first)
    for key, value in second.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            value = _merged(result[key], value)
        result[key] = value
    return result
