from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.load import check
from core.errors import UserError
from pretrain.engine_config import EngineConfig
from pretrain.fragments import read_weights
from pretrain.numerics import resolve_precision
from pretrain.stopwatch import PARTS
from tests import gloo
from tests.pretrain import engine_cases
from tests.pretrain.engine_cases import relative_error
from tests.pretrain.given_gradients import SHAPES

MEANS = [(0, "fp32", 1), (1, "fp32", 1), (1, "fp32", 3), (2, "fp32", 3), (1, "bf16", 3)]
# (optimiser, stage, precision, clipping)
BITWISE = [
    ("lamb", 0, "fp32", 1.0),
    ("lamb", 1, "fp32", 1.0),
    ("lamb", 2, "bf16", 1.0),
    ("lamb", 2, "fp32", 0.0),
    ("lamb", 1, "bf16", 1.0),
    ("adamw", 1, "fp32", 1.0),
]
FAULTS = [(0, "fp32"), (1, "fp32"), (2, "fp32"), (1, "bf16"), (2, "bf16")]
STAGE = [
    ((1, "fp32"), (2, "fp32")),
    ((0, "fp32"), (1, "fp32")),
    ((2, "fp32"), (0, "fp32")),
    ((1, "bf16"), (1, "fp32")),
    ((1, "bf16"), (2, "bf16")),
    ((0, "fp32"), (1, "bf16")),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def alone(folder: str) -> dict[str, Any]:
    suite = (folder, MEANS, BITWISE, FAULTS, STAGE)
    return gloo.run(1, engine_cases.engine_suite, *suite, timeout=300)[0]


@pytest.fixture(scope="module")
def pair(folder: str, alone: dict[str, Any]) -> list[dict[str, Any]]:
    suite = (folder, MEANS, BITWISE, FAULTS, STAGE)
    return gloo.run(2, engine_cases.engine_suite, *suite, timeout=300)


@pytest.mark.parametrize("case", MEANS, ids=str)
def test_global_means_at_any_split(
    alone: dict[str, Any], pair: list[dict[str, Any]], case: tuple
) -> None:
    """12 rows with unequal masks: 12, 3 x 4, 2 ranks x 6 and 2 ranks x 3 x 2 are one step."""
    tolerance = 1e-5 if case[1] == "fp32" else 0.02
    expected, expected_weights, _ = alone["means"][MEANS[0]]
    for result in (alone, pair[0], pair[1]):
        numbers, weights, training = result["means"][case]
        assert training
        np.testing.assert_allclose(numbers, expected, rtol=tolerance, atol=1e-7)
        if case[1] == "fp32":
            # Softmax does not see the bias of the keys: its gradient is rounding noise.
            seen = {n: w for n, w in expected_weights.items() if not n.endswith("key.bias")}
            assert relative_error(weights, seen) < 1e-4


def test_the_losses_told_are_of_what_damage_has_left(
    alone: dict[str, Any], pair: list[dict[str, Any]]
) -> None:
    for result in (alone, *pair):
        (evaluated, told), of_nothing = result["emptied"]
        np.testing.assert_allclose(told, evaluated, rtol=1e-6)
        assert of_nothing == (True, False, 5)


@pytest.mark.parametrize("case", BITWISE, ids=str)
def test_resume_is_bitwise(alone: dict[str, Any], pair: list[dict[str, Any]], case: tuple) -> None:
    for result in (alone, *pair):
        assert set(result["bitwise"][case].values()) == {True}, result["bitwise"][case]


@pytest.mark.parametrize("case", STAGE, ids=str)
def test_resume_at_another_stage_or_precision(
    alone: dict[str, Any], pair: list[dict[str, Any]], case: tuple
) -> None:
    for result in (alone, *pair):
        assert result["converted"][case] < 2e-6


def test_folders_of_older_versions_load(alone: dict[str, Any], pair: list[dict[str, Any]]) -> None:
    for result in (alone, *pair):
        assert result["old_folders"].keys() >= {"BF16_Optimizer", "fp32 stage 0"}
        assert max(result["old_folders"].values()) < 2e-6, result["old_folders"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_resume_at_another_world_size(
    folder: str, alone: dict[str, Any], pair: list[dict[str, Any]], precision: str
) -> None:
    stayed = alone["moved"]["stayed", precision]
    for rank in pair:
        assert relative_error(rank["moved"]["moved", precision], stayed) < 1e-6
    checkpoint = str(Path(folder) / f"{precision}-from-world-2")
    fewer = gloo.run(1, engine_cases.load_and_run, 2, precision, checkpoint, 5, 10)[0]
    assert relative_error(fewer, pair[0]["moved"]["stayed", precision]) < 1e-6
    assert {n: tuple(w.shape) for n, w in read_weights(Path(checkpoint)).items()} == SHAPES


@pytest.mark.slow
@pytest.mark.parametrize(
    "source, target", [((4, 1), (2, 2)), ((4, 1), (3, 1)), ((1, 0), (4, 1)), ((3, 2), (4, 1))]
)
def test_resume_at_larger_world_sizes(
    tmp_path: Path, source: tuple[int, int], target: tuple[int, int]
) -> None:
    _check_world_change(tmp_path, source, target)


def _check_world_change(tmp_path: Path, source: tuple[int, int], target: tuple[int, int]) -> None:
    (world, stage), (new_world, new_stage) = source, target
    folder = str(tmp_path)
    stayed = gloo.run(world, engine_cases.run_and_save, stage, "fp32", folder, 5, 20)[0]
    moved = gloo.run(new_world, engine_cases.load_and_run, new_stage, "fp32", folder, 5, 20)
    # Stage 0 works tensor by tensor, in another order of operations than the slices.
    bound = 1e-6 if stage > 0 else 2e-6
    for weights in moved:
        assert relative_error(weights, stayed) < bound
    assert {n: tuple(w.shape) for n, w in read_weights(tmp_path).items()} == SHAPES


def test_gradients_are_reduced_once_a_step(pair: list[dict[str, Any]]) -> None:
    for rank in pair:
        reduced = rank["reductions"]
        for stage, precision in engine_cases.MODES:
            once, thrice = (reduced[stage, precision, micro_steps] for micro_steps in (1, 3))
            # Stage 2 keeps no whole gradient, so it must reduce each micro-step's.
            assert thrice > 2 * once if stage == 2 else thrice == once > 0


@pytest.mark.parametrize("mode", engine_cases.MODES, ids=str)
def test_gradients_are_summed_in_fp32(
    alone: dict[str, Any], pair: list[dict[str, Any]], mode: tuple
) -> None:
    for result in (alone, *pair):
        norm_error, error = result["fine_sums"][mode]
        assert norm_error < 1e-6 and error < 1e-6


def test_operators_of_a_step(alone: dict[str, Any], pair: list[dict[str, Any]]) -> None:
    """bf16 at stage 1, T tensors on W ranks, beside the model's own operators: one sum a tensor and
    micro-step; at the boundary a sum, a copy into the bucket, and for this rank's tensors a sum
    into the slice and a widening. The host looks at the norm, to skip and to clip, and waits for
    nothing else."""
    for world, ranks in ((1, [alone]), (2, pair)):
        for result in ranks:
            few, many = result["operators"][10], result["operators"][30]
            assert many["wrapper"] == "DeepSpeedZeroOptimizer" and many["waits"] == 0
            assert many["reads"] == 2
            assert (many["middle"] - few["middle"]) / 20 == 1 and few["middle"] < 25
            assert (many["boundary"] - few["boundary"]) / 20 <= 2 + 2 / world
            assert few["boundary"] < 150


def test_each_reduction_is_timed_as_one_and_parts_stay_within_the_step(
    alone: dict[str, Any], pair: list[dict[str, Any]]
) -> None:
    for rank in (alone, *pair):
        for seconds, whole, _ in rank["timings"].values():
            assert tuple(seconds) == PARTS and min(seconds.values()) > 0
            assert sum(seconds.values()) < whole
    for rank in pair:
        for (stage, _, overlap), (_, _, reduced) in rank["timings"].items():
            # Beside the gradients: norms in the update, losses after it.
            assert set(reduced) <= {"reduce", "at the end", "update", ""}
            gradients = reduced.get("reduce", 0) + reduced.get("at the end", 0)
            assert gradients >= sum(np.prod(shape) for shape in SHAPES.values())
            assert (reduced.get("reduce", 0) > 0) == (stage == 2 or overlap)


@pytest.mark.parametrize("case", FAULTS, ids=str)
def test_a_gradient_that_is_not_finite_skips_the_step_on_all_ranks(
    alone: dict[str, Any], pair: list[dict[str, Any]], case: tuple
) -> None:
    for result in (alone, *pair):
        outcome, same, bad_after, moved = result["not_finite"][case]
        assert outcome.skipped and outcome.bad and outcome.grad_norm == np.inf and same
        assert not bad_after and moved


def test_fp16_scales_and_is_exact(alone: dict[str, Any], pair: list[dict[str, Any]]) -> None:
    for result in (alone, *pair):
        for stage in (1, 2):
            scales, skipped, error, restored, steps = result["loss_scaling"][stage]
            assert skipped[0] and not any(skipped[10:20])
            overflows = skipped.index(False)
            assert scales[0] == 2.0**24 and scales[overflows] == 2.0 ** (24 - overflows)
            assert max(scales[overflows:]) > scales[overflows], "the window raises the scale"
            assert error < 1e-6
            assert restored[0] == restored[2] and restored[1]
            assert set(steps) == {0.0}, "bias correction restarts, the scale stays"
        assert result["loss_scaling"]["smallest"] == [(True, 1.0)] * 3


def test_details(alone: dict[str, Any], pair: list[dict[str, Any]]) -> None:
    for result in (alone, *pair):
        details = result["details"]
        assert details["shared_memory_op"] is None
        in_all, of_a_rank = details["planned_bytes"]
        assert sum(details["tensor_bytes"]) == in_all
        assert details["tensor_bytes"][0] == pytest.approx(of_a_rank, abs=12 * 16)  # its padding
        assert details["masters_are_fp32"] and details["module_follows"]
        assert details["initial_is_fp32"]
        missing, extra, wrong, typo, section, *values = details["errors"]
        assert typo.startswith("engine.deepspeed:") and "overlap_com" in typo
        assert section.endswith("no such key; did you mean wall_clock_breakdown?")
        refused = ["communication_data_type", "sequence_parallel_size"]
        refused += ["csv_monitor"] * (result is alone)
        for key, value in zip(refused, values, strict=True):
            assert value.startswith(f"engine.deepspeed: DeepSpeed does not start with {key}: ")
        assert "missing key bert.pooler.dense.bias" in missing
        assert "unknown key bert.pooler.dense.scale" in extra
        assert "bert.pooler.dense.bias is [3], config says [32]" in wrong
        assert details["config_stands"] == (0.5, (0.8, 0.999), 0.25)
        assert details["no_trust"] is None
        assert details["phase"] == [(True, [1.0, 1.0]), (True, [4.0, 4.0])]


class Evil:
    """Unpickled, it makes a folder."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.mark),)


STRANGERS = [
    "mp_rank_01_x",
    "mp_rank_00_model_states.pt.bak",
    "sub/mp_rank_00_model_states.pt",
    "sub/zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "zero_pp_rank_7_mp_rank_00_optim_states.pt.x",
    "zero_pp_rank_0_mp_rank_00_optim_states.pt.pkl",
]
LAYOUTS = {"new": "fp32-from-world-2", "old": "old-2-fp32-stage-2"}


@pytest.fixture
def hostile(request: pytest.FixtureRequest, tmp_path: Path, folder: str, pair: Any) -> Path:
    """A folder of two ranks with files beside its own that run code when they are unpickled."""
    place = tmp_path / "engine"
    shutil.copytree(Path(folder) / LAYOUTS[request.param], place)
    (place / "sub").mkdir()
    for name in STRANGERS:
        torch.save({"module": Evil(tmp_path / "owned")}, place / name)
    return place


@pytest.mark.parametrize("hostile", LAYOUTS, indirect=True)
def test_strangers_in_a_folder_are_not_read_at_another_world_size(
    hostile: Path, tmp_path: Path
) -> None:
    gloo.run(1, engine_cases.load_and_run, 1, "bf16", str(hostile), 3, 0)
    assert {n: tuple(w.shape) for n, w in read_weights(hostile).items()} == SHAPES
    assert not (tmp_path / "owned").exists()


@pytest.mark.parametrize("hostile", ["new"], indirect=True)
def test_a_parameter_that_stands_among_the_buffers_is_one_line(hostile: Path) -> None:
    name = "word.weight"
    weight = read_weights(hostile)[name]
    for file in sorted(hostile.glob("rank-*.safetensors")):
        tensors = {key: t for key, t in load_file(file).items() if f"|{name}|" not in key}
        save_file(tensors | ({f"value|{name}|0": weight} if "00000" in file.name else {}), file)
    meta = json.loads((hostile / "engine.json").read_text())
    del meta["shapes"][name], meta["updates"][name]
    (hostile / "engine.json").write_text(json.dumps(meta))
    assert read_weights(hostile)[name].shape == weight.shape
    (said,) = gloo.run(1, engine_cases.refusal, str(hostile))
    assert said == f"{hostile}: missing key {name}"


@pytest.mark.parametrize("hostile", ["old"], indirect=True)
@pytest.mark.parametrize("name", ["{}/drop", "../../drop", "word.weight/../../drop"])
def test_a_parameter_name_is_no_path(hostile: Path, tmp_path: Path, name: str) -> None:
    from deepspeed.utils.tensor_fragment import fragment_address

    name = name.format(tmp_path)
    path = hostile / "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    with torch.serialization.safe_globals([fragment_address]):
        shard = torch.load(path, weights_only=True)
    mapping = shard["optimizer_state_dict"]["param_slice_mappings"][0]
    mapping[name] = mapping.pop("word.weight")
    torch.save(shard, path)
    with pytest.raises(UserError, match="drop"):
        read_weights(hostile)
    assert not (tmp_path / "owned").exists() and not list(tmp_path.rglob("drop*"))


@pytest.mark.parametrize("hostile", ["old"], indirect=True)
def test_damaged_files_of_older_versions_end_in_one_line_or_in_numbers(
    hostile: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(3)
    good = {p.name: p.read_bytes() for p in hostile.glob("*states.pt")}
    assert len(good) == 3
    for _ in range(300):
        name = str(rng.choice(sorted(good)))
        raw = bytearray(good[name])
        # The pickle is at the start, the directory of the archive at the end.
        size = len(raw) if rng.random() < 0.2 else min(len(raw), 2500)
        at = (
            int(rng.integers(size))
            if rng.random() < 0.6
            else len(raw) - 1 - int(rng.integers(size))
        )
        if rng.random() < 0.2:
            del raw[at:]
        else:
            raw[at] ^= 1 << int(rng.integers(8))
        (hostile / name).write_bytes(raw)
        try:
            read_weights(hostile)
        except UserError as error:
            assert "\n" not in str(error)
        (hostile / name).write_bytes(good[name])
    read_weights(hostile)
    assert not (tmp_path / "owned").exists()


def test_a_payload_in_the_place_of_a_file_is_not_run(tmp_path: Path) -> None:
    meta = {"format": "bert-engine-1", "world_size": 1, "zero_stage": 1, "precision": "fp32"}
    (tmp_path / "engine.json").write_text(json.dumps(meta))
    torch.save({"module": Evil(tmp_path / "owned")}, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(UserError, match="mp_rank_00_model_states.pt"):
        read_weights(tmp_path)
    assert not (tmp_path / "owned").exists()
    with pytest.raises(UserError, match="engine.json"):
        read_weights(tmp_path / "nowhere")


def refused_as_damage(folder: Path, model: dict[str, Any]) -> None:
    """An engine folder of the format before, of stage 0, that holds this."""
    torch.save(model, folder / "mp_rank_00_model_states.pt")
    meta = {"format": "bert-engine-1", "world_size": 1, "zero_stage": 0, "precision": "fp32"}
    (folder / "engine.json").write_text(json.dumps(meta))
    with pytest.raises(UserError, match="damaged"):
        read_weights(folder)


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("kind", ["sparse", "meta", "one for all", "one for a row"])
def test_a_tensor_that_does_not_hold_its_numbers_is_damage(
    tmp_path: Path, kind: str, trained: bool
) -> None:
    """Said in a few bytes, it would fill the memory or end in a traceback where it is used."""
    size, whole = 1 << 40, torch.zeros(3)
    odd = {
        "sparse": whole.to_sparse(),
        "meta": torch.zeros(size, device="meta"),
        "one for all": torch.zeros(1).expand(size),
        "one for a row": torch.zeros(4, 1).expand(4, 1000),  # little, so that a copy is made
    }[kind]
    shapes = {"w": whole.shape} | ({"x": odd.shape} if trained else {})
    moments = {"step": 1.0, "exp_avg": whole, "exp_avg_sq": whole}
    states = {0: moments, 1: moments | {"exp_avg": odd, "exp_avg_sq": odd}}
    model = {
        "module": {"w": whole, "x": odd},
        "optimizer": {"fp32": {"w": whole, "x": odd}, "state": {"state": states}},
        "param_shapes": [shapes], "engine": {"steps": 1}, "loss_scaler": {},
    }  # fmt: skip
    refused_as_damage(tmp_path, model)


@pytest.mark.parametrize("odd", ["no moment", "a number for a name", "a text for a size", "more"])
def test_an_old_checkpoint_of_other_parts_is_damage(tmp_path: Path, odd: str) -> None:
    whole = torch.zeros(3)
    name: Any = 1.5 if odd == "a number for a name" else "w"
    state = {"step": 1.0, "exp_avg": whole, "exp_avg_sq": whole}
    if odd == "no moment":
        del state["exp_avg_sq"]
    model = {
        "module": {name: whole} | ({True: whole} if odd == "more" else {}),
        "param_shapes": [{name: "a" * 999 if odd == "a text for a size" else whole.shape}],
        "optimizer": {"fp32": {name: whole}, "state": {"state": {0: state}}},
        "engine": {"steps": 1}, "loss_scaler": {},
    }  # fmt: skip
    refused_as_damage(tmp_path, model)


@pytest.mark.parametrize(
    "tree, message",
    [
        ({"zero_stage": 3}, "stage 3 gathers"),
        ({"zero_stage": 0, "precision": "fp16"}, "use zero_stage 1"),
        ({"zero_stage": 0, "precision": "bf16"}, "sums bf16 gradients in bf16.*use zero_stage 1"),
        ({"deepspeed": {"train_batch_size": 4}}, "deepspeed.train_batch_size: is set by phases"),
        ({"deepspeed": {"bf16": {"enabled": True}}}, "set by engine.precision"),
        ({"deepspeed": {"zero_optimization": {"stage": 2}}}, "set by engine.zero_stage"),
        (
            {"deepspeed": {"flops_profiler": {"enabled": True, "module_depth": "x"}}},
            "flops_profiler.* is refused: .*throughput/mfu",
        ),
        (
            {"deepspeed": {"zero_optimization": {"round_robin_gradients": True}}},
            "round_robin_gradients: is refused: .*mix up",
        ),
        (
            {"zero_stage": 0, "deepspeed": {"zero_optimization": {"overlap_comm": True}}},
            "no effect",
        ),
        (
            {"deepspeed": {"zero_optimization": {"reduce_bucket_size": 0}}},
            "of 1 or more .* given 0",
        ),
        ({"deepspeed": {"zero_optimization": {"reduce_bucket_size": "5e8"}}}, "given '5e8'"),
        ({"deepspeed": {"zero_optimization": {"reduce_bucket_size": None}}}, "given None"),
        ({"deepspeed": {"steps_per_print": 0}}, "steps_per_print: a number of 1 or more"),
        ({"deepspeed": {"steps_per_print": []}}, "steps_per_print: a number of 1 or more"),
        ({"deepspeed": {"optimizer": {"type": "Adam"}}}, "set by optimizer.name"),
    ],
)
def test_config_refuses(tree: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(tree, EngineConfig, "x.yaml")


def test_precision_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert resolve_precision(EngineConfig(), cpu) == "fp32"
    assert resolve_precision(EngineConfig(precision="bf16"), cpu) == "bf16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert resolve_precision(EngineConfig(), cuda) == "bf16"
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert resolve_precision(EngineConfig(), cuda) == "fp16"
    with pytest.raises(UserError, match="use zero_stage 1"):
        resolve_precision(EngineConfig(zero_stage=0), cuda)
