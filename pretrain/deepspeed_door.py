"""The only import of deepspeed: how it is started, and where it is made to do otherwise.

`PATCHES` is the list of those places. Each is applied once, when DeepSpeed is imported; one whose
target is gone in another version of DeepSpeed ends in one line that names it.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.metadata
import io
import logging
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError
from torch import nn

from core.errors import UserError
from pretrain import distributed
from pretrain.engine_config import EngineConfig
from pretrain.optim import Piece

VERSION = "0.19.8"  # what the rows below were written for and tested with


@dataclass(frozen=True)
class Patch:
    """`target` (module:attribute) is replaced by `new(what stands there)`.

    test: where in tests/pretrain the effect is shown.
    """

    target: str
    new: Callable[[Any], Any]
    why: str
    test: str


def _nothing(_: Any) -> Callable[..., None]:
    return lambda *args, **more: None


class _StandardError:
    """Whatever sys.stderr is when something is written."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def _quieter(logger: logging.Logger) -> logging.Logger:
    for handler in logger.handlers:
        if type(handler) is logging.StreamHandler:  # its own; what others derive stays theirs
            handler.setStream(_StandardError())
    logger.addFilter(_is_news)
    return logger


def _is_news(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    return "untested optimizer" not in text and "OVERFLOW" not in text


def _zero_for_bf16(choose: Callable[..., str]) -> Callable[..., str]:
    from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION

    @functools.wraps(choose)
    def chosen(engine: Any, optimizer: Any) -> str:
        name = choose(engine, optimizer)
        return ZERO_OPTIMIZATION if name == BFLOAT16 else name

    return chosen


def _one_sum(_: Any) -> Callable[..., None]:
    def add(zero: Any, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            return
        if parameter.grad_accum is None:
            parameter.grad_accum = parameter.grad.to(zero.gradient_accumulation_dtype)
        else:
            parameter.grad_accum.add_(parameter.grad)
        parameter.grad = None

    return add


def _by_the_norm(check: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(check)
    def checked(zero: Any, *args: Any, **more: Any) -> None:
        if zero.cpu_offload:  # there the norm is not of what was reduced
            check(zero, *args, **more)

    return checked


def _norms_at_once(_: Any) -> Callable[..., torch.Tensor]:
    def norm(zero: Any, gradients: list[torch.Tensor], *_: Any, **__: Any) -> torch.Tensor:
        own = [g for g in gradients if not getattr(g, "_zero_padding", False)]
        total = torch.zeros((), device=zero.device)
        if own:
            norms = torch._foreach_norm(own, 2, dtype=torch.float64)
            total = torch.stack(norms).square().sum().float()
        dist.all_reduce(total, group=zero.dp_process_group)
        return torch.where(total.isfinite(), total.sqrt(), -1.0)  # -1: DeepSpeed's not finite

    return norm


def _as_it_is(_: Any) -> Callable[..., Any]:
    return lambda: lambda function: function


def _with_timeout(_: Any) -> Callable[..., Any]:
    return lambda backend, ranks: dist.new_group(ranks, timeout=distributed.TIMEOUT)


def _patient(start: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(start)
    def started(scaler: Any, *args: Any, **more: Any) -> None:
        start(scaler, *args, **more)
        scaler.raise_error_at_min_scale = False

    return started


PATCHES = (
    Patch(
        "deepspeed.comm.torch:build_shm_op",
        _nothing,
        "the shared-memory all-reduce is compiled at the first start (40 s) and leaves the peers "
        "of a killed process spinning; plain gloo does neither",
        "test_engine.py::test_details",
    ),
    Patch(
        "deepspeed.utils:logger",
        _quieter,
        "standard output is the program's; LAMB is tested here, and overflows are reported by the "
        "trainer, so neither is worth a warning",
        "test_deepspeed_door.py::test_patches_are_in_place_and_say_nothing",
    ),
    Patch(
        "deepspeed.runtime.engine:DeepSpeedEngine._do_optimizer_sanity_check",
        _zero_for_bf16,
        "bf16 with fp32 sums at stage 1 would get BF16_Optimizer: no buckets, no overlap, a second "
        "copy of the gradients, 800 operators a micro-step, all gradients clipped on every rank",
        "test_engine.py::test_each_reduction_is_timed_as_one_and_parts_stay_within_the_step",
    ),
    Patch(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._fill_param_grad_accum_attribute",
        _one_sum,
        "one mixed add (10 bytes an element) for a widened copy and an add (18)",
        "test_engine.py::test_operators_of_a_step",
    ),
    Patch(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.check_overflow",
        _by_the_norm,
        "the norm that follows finds every inf and NaN as well; the check reads each gradient once "
        "more, waits for the device and all-reduces",
        "test_engine.py::test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks",
    ),
    Patch(
        "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.get_grad_norm_direct",
        _norms_at_once,
        "each gradient is copied to fp64 first (20 bytes an element for 4), by four operators; one "
        "for all reads them and adds in fp64",
        "test_engine.py::test_operators_of_a_step",
    ),
    Patch(
        "deepspeed.comm.torch:TorchBackend.new_group",
        _with_timeout,
        "its group would keep NCCL's own timeout of 10 minutes, and end a rank in a slow place "
        "before the watchdog does, which says where it is",
        "test_deepspeed_door.py::test_patches_are_in_place_and_say_nothing",
    ),
    Patch(
        "deepspeed.runtime.compiler:compile",
        _as_it_is,
        "ZeRO imports Muon, whose compiled functions load all of torch's compiler (a second of CPU "
        "a rank); none of them is called",
        "test_deepspeed_door.py::test_patches_are_in_place_and_say_nothing",
    ),
    Patch(
        "deepspeed.runtime.fp16.loss_scaler:DynamicLossScaler.__init__",
        _patient,
        "an overflow at the smallest scale raises; the trainer bounds the streak of bad steps",
        "test_engine.py::test_fp16_scales_and_is_exact",
    ),
)  # fmt: skip


@functools.cache
def deepspeed() -> Any:
    """The package, patched. UserError if this version lacks the target of a patch."""
    with quiet():
        package = importlib.import_module("deepspeed")
    for patch in PATCHES:
        apply(patch)
    return package


def apply(patch: Patch) -> None:
    """Replace the target of one patch; UserError if it is not there."""
    module, _, path = patch.target.partition(":")
    *owners, name = path.split(".")
    try:
        owner: Any = importlib.import_module(module)
        for part in owners:
            owner = getattr(owner, part)
        setattr(owner, name, patch.new(getattr(owner, name)))
    except (ImportError, AttributeError):
        raise UserError(
            f"deepspeed {importlib.metadata.version('deepspeed')} has no {patch.target}, which "
            f"this program changes ({patch.why}); install deepspeed {VERSION}"
        ) from None


def settings(
    config: EngineConfig,
    precision: str,
    *,
    micro_steps: int,
    micro_batch_rows: int,
    parameters: int,
) -> dict[str, Any]:
    """DeepSpeed's JSON: defaults of this program, over them `engine.deepspeed`, over both what the
    engine relies on."""
    stage = config.zero_stage
    # Its throughput timer makes a GPU's host wait twice a micro-step.
    defaults: dict[str, Any] = {"timers": {"throughput": {"enabled": False}}}
    ours: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": micro_batch_rows,
        "gradient_accumulation_steps": micro_steps,
        "gradient_clipping": config.gradient_clipping if stage > 0 else 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    if stage > 0:
        # overlap_comm at stage 1: the last micro-step's backward sends what is ready. Several
        # buckets (DeepSpeed's own of 5e8 elements is 2 GB for any model), or there is nothing to
        # send before the end of backward; but each has its latency (between two CPU ranks eight
        # small ones cost a fifth of a step).
        bucket = min(parameters, max(-(-parameters // 8), 10_000_000), 50_000_000)
        defaults["zero_optimization"] = {"reduce_bucket_size": bucket, "overlap_comm": True}
        ours["zero_optimization"] = {"stage": stage}
    if precision != "fp32":
        ours[precision] = {"enabled": True}
        # Sums over many micro-steps and ranks lose what 8 or 11 bits cannot hold.
        ours["data_types"] = {"grad_accum_dtype": "fp32"}
        defaults["communication_data_type"] = "fp32"
    return _merged(_merged(defaults, config.deepspeed), ours)


def _merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """`second` laid over `first`, section by section."""
    result = dict(first)
    for key, value in second.items():
        if isinstance(value, Mapping) and isinstance(result.get(key), Mapping):
            value = _merged(result[key], value)
        result[key] = value
    return result


_STUMBLES = (
    *(ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError),
    *(ImportError, OSError),  # of `wandb.enabled`, say, and `csv_monitor.output_path`
)


def check_precision(precision: str) -> None:
    """UserError where the device lacks it."""
    accelerator = deepspeed().accelerator.get_accelerator()
    # An emulated bf16 trains, many times slower than fp16 does there.
    has_bf16 = accelerator.is_bf16_supported
    if accelerator.device_name() == "cuda":
        has_bf16 = functools.partial(torch.cuda.is_bf16_supported, including_emulation=False)
    has = {"fp16": accelerator.is_fp16_supported, "bf16": has_bf16}
    if precision in has and not has[precision]():
        raise UserError(
            f"engine.precision: {precision} is not supported on {accelerator.device_name()} "
            "here; auto chooses what is"
        )


def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    json_: dict[str, Any],
    given: Mapping[str, Any],
) -> Any:
    """DeepSpeed's engine around model and optimiser.

    UserError for keys of `json_` that DeepSpeed does not know or whose values it refuses. given:
    what of `json_` the user has chosen.
    """
    package = deepspeed()
    read = _Read(json_)
    with quiet():
        try:
            engine, *_ = package.initialize(model=model, optimizer=optimizer, config=read)
        except ValidationError as error:
            wrong = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()]
            raise UserError(f"engine.deepspeed: {'; '.join(wrong)}") from None
        except package.runtime.config.DeepSpeedConfigError as error:
            raise UserError(f"engine.deepspeed: {error}") from None
        except _STUMBLES as error:
            if not given:
                raise
            raise UserError(
                f"engine.deepspeed: DeepSpeed does not start with {', '.join(given)}: "
                f"{type(error).__name__}: {error}"
            ) from None
    for key in json_:
        if key not in read.asked | _ASKED_ELSEWHERE:
            near = difflib.get_close_matches(key, read.asked, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UserError(f"engine.deepspeed.{key}: DeepSpeed has no such key{hint}")
    return engine


def pieces_of(named: Iterable[tuple[str, nn.Parameter]]) -> list[Piece]:
    """What this rank's slice holds of a group's parameters, as stages 1 and 2 have dealt them."""
    pieces = []
    for name, parameter in named:
        if (mapping := parameter._hp_mapping) is not None:
            here, there = mapping.get_hp_fragment_address(), mapping.lp_fragment_address
            pieces.append(Piece(name, there.start, here.numel, here.start))
    return pieces


def time_reductions(engine: Any, timed: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap what reduces gradients in `timed`: the rest at the end of backward and, with
    overlap_comm or at stage 2, each full bucket on the way."""
    engine.allreduce_gradients = timed(engine.allreduce_gradients)
    if hasattr(engine.optimizer, "reduce_ipg_grads"):
        engine.optimizer.reduce_ipg_grads = timed(engine.optimizer.reduce_ipg_grads)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Swallow prints of DeepSpeed; if it fails, they go to the exception as notes."""
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            yield
    except Exception as error:
        error.add_note(out.getvalue())
        raise


# Keys that DeepSpeed looks for by other means than `_Read` sees.
_ASKED_ELSEWHERE = {"aio"}


class _Read(dict[str, Any]):
    """A dictionary that remembers what it was asked for: DeepSpeed passes over unknown keys."""

    def __init__(self, plain: Mapping[str, Any]) -> None:
        super().__init__(plain)
        self.asked: set[str] = set()

    def get(self, key: str, *default: Any) -> Any:
        self.asked.add(key)
        return super().get(key, *default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)
