"""The page of a run says what its files say, and a foreign name in them is text."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from configs.load import check, dump
from core.errors import UserError
from pretrain import page
from pretrain.config import PretrainConfig
from pretrain.report import main

STEPS = range(10, 41, 10)


def run(folder: Path, **model: int) -> Path:
    """Four records of 10 steps: 2 s a step in phase 1, 4 s in phase 2, which begins at step 20."""
    shape = {"sequences_per_step": 4, "max_predictions": 3, "micro_batch_rows": 1}
    phases = [{"max_seq_len": n, "steps": 20, **shape} for n in (16, 64)]
    config = {"run_dir": "<b>" + folder.name, "data": {"dir": "data"}, "phases": phases}
    config["model"] = model
    folder.mkdir()
    (folder / "config.yaml").write_text(dump(check(config, PretrainConfig, "test")))
    lines = []
    for step in STEPS:
        rates = {"throughput/step_seconds": 2.0 if step <= 20 else 4.0, "time/forward": 1.0}
        losses = {"train/loss": 9.0, "train/mlm_loss": 8 - step / 10, "progress/tokens": 1e6 * step}
        lines.append({"step": step, "time": 100.0 + step, **losses, **rates})
        trust = {"trust_ratio_output.dense.weight/layer_00": 0.1 * step}
        lines.append({"step": step, "time": 100.0 + step, **trust})
    scores = {"heldout/mlm_loss": 4.25, "heldout/mlm_accuracy": 0.31, "heldout/max_seq_len": 64}
    lines.append({"step": 40, "time": 141.0, **scores})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    found = page.read(run(tmp_path / "a"), now=150.0)
    assert found.column("step").tolist() == list(STEPS)
    assert found.hours * 3600 == pytest.approx(np.array([20, 40, 80, 120]))
    assert found.at(found.hours * 3600, [30]) == pytest.approx(80)
    assert found.trust == {("layer_00", "output.dense.weight"): pytest.approx(4.0)}
    assert np.isnan(found.column("nothing")).all()


def test_the_page_is_one_small_file_without_a_script(tmp_path: Path) -> None:
    folder, file = run(tmp_path / "<script>x"), tmp_path / "page.html"
    page.write([str(folder)], file, now=150.0)
    text = file.read_text()
    assert len(text) < 1_000_000 and text.count("<svg") == 4
    assert "<script" not in text and "&lt;script&gt;x" in text and "&lt;b&gt;" in text
    assert not re.search(r'(?:src|href)="(?!#)(?!data:)', text)
    for said in ("4.250 nats, 31.0% of words right (step 40)", "40.0 M", "2:00", "trust ratios"):
        assert said in text
    page.write([str(folder)], tmp_path / "again.html", now=150.0)
    assert (tmp_path / "again.html").read_text() == text


def test_several_runs_show_the_keys_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [run(tmp_path / "a", num_hidden_layers=2), run(tmp_path / "<i>", num_hidden_layers=3)]
    file = tmp_path / "page.html"
    assert main([*map(str, folders), "--html", str(file)]) == 0
    cells = re.findall(r"<td>([\w.]+)</td><td>([^<]*)</td><td>([^<]*)</td>", file.read_text())
    keys = {key: (a, b) for key, a, b in cells}
    assert "<i>" not in file.read_text()
    assert keys["model.num_hidden_layers"] == ("2", "3")
    assert "seed" not in keys and "model.hidden_size" not in keys
    with pytest.raises(UserError, match="by --html"):
        main([*map(str, folders)])


def test_a_run_without_a_record_is_named(tmp_path: Path) -> None:
    folder = run(tmp_path / "a")
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 2}\n')
    with pytest.raises(UserError, match="a/metrics.jsonl: no step is recorded"):
        page.write([str(folder)], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
