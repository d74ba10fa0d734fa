"""What came of a step is learnt one step late, and a run ends as if it had been at once."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pretrain import checkpoint
from pretrain.engine import LateOutcome
from tests import gloo
from tests.pretrain import test_rollback, test_train
from tests.pretrain.test_train import losses, weights

data = test_train.data  # the fixture


class Misread(test_rollback.Poisoned):
    """The loss of the steps in `bad` is not finite, and their gradients are."""

    wrong: frozenset[tuple[int, int]] = frozenset()

    def build_engine(self) -> Any:
        engine = super().build_engine()
        step = engine.train_step

        def train_step(*arguments: Any) -> LateOutcome:
            late = step(*arguments)
            if test_rollback.Placed.now not in Misread.wrong:
                return late
            return LateOutcome(False, lambda: dataclasses.replace(late.now, loss=math.nan))

        engine.train_step = train_step
        return engine


def two_runs(rank: int, size: int, data: Path, out: Path) -> dict[str, Any]:
    bad, often = {(0, 3), (0, 4)}, ("checkpoint.every_steps=3", "evaluation.every_steps=0")
    never = test_rollback.run(data, out / "never", bad, *often, drop=True)
    test_rollback.Poisoned, Misread.wrong = Misread, frozenset(bad)
    late = test_rollback.run(data, out / "late", set(), *often)
    state = checkpoint.read_state(checkpoint.resolve(out / "late"))
    return {
        "codes": (never, late),
        "weights": [
            {n: w.numpy() for n, w in weights(out / name).items()} for name in ("never", "late")
        ],
        "losses": [losses(out / name) for name in ("never", "late")],
        "rollbacks": [(r.step, r.back_to, [s.steps for s in r.skips]) for r in state.rollbacks],
    }


@pytest.mark.slow
def test_a_loss_that_is_not_finite_is_seen_one_step_late_and_leaves_no_trace(
    data: Path, tmp_path: Path
) -> None:
    for found in gloo.run(2, two_runs, data, tmp_path):
        assert found["codes"] == (0, 0)
        # Steps 4 and 5 are bad; 6, which had begun, is thrown away with them.
        assert found["rollbacks"] == [(6, 3, [2])]
        never, late = found["weights"]
        assert all(np.array_equal(w, never[name]) for name, w in late.items())
        assert found["losses"][0] == found["losses"][1]
        assert list(found["losses"][1]) == list(range(1, 11))
