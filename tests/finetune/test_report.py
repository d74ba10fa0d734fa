"""The report: every job once, every measure that the paper has, damaged results left out."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
from pathlib import Path

import pytest

from configs.load import dump
from finetune import loading, report
from finetune.__main__ import main
from finetune.results import PAPER, papers_score
from pretrain.metrics import Recorder
from tests.finetune import tiny
from tests.finetune.test_train import config, make_files


def job(run: Path, task: str, seed: int, scores: dict, test: dict | None = None, **changes) -> Path:
    """A finished job; the first of the scores is the main one."""
    folder = run / task / f"b16-lr{changes.get('learning_rate', 2e-5):g}-e3-s{seed}"
    folder.mkdir(parents=True)
    plain = {
        "task": task,
        "batch_size": 16,
        "learning_rate": 2e-5,
        "epochs": 3.0,
        "seed": seed,
        "init": "pretrained",
        "trained": "all",
        "main": next(iter(scores)),
        "scores": scores,
        "test": test or {},
        "failed": False,
        "notes": ["not the report's"],
    }
    (folder / "result.json").write_text(json.dumps(plain | changes))
    return folder


@pytest.mark.parametrize(
    "named", [["rr", "rr/a"], ["rr/a", "rr/a/"], ["rr/a/RTE/b16-lr2e-05-e3-s1", "link", "rr"]]
)
def test_a_job_that_is_named_twice_counts_once(tmp_path, monkeypatch, named) -> None:
    for seed in (0, 1):
        job(tmp_path / "rr/a", "RTE", seed, {"accuracy": 60.0 + seed})
    (tmp_path / "link").symlink_to(tmp_path / "rr")
    monkeypatch.chdir(tmp_path)
    (row,) = report.rows(report.results(named))
    assert (row.run, row.jobs, row.seeds, row.mean) == ("rr/a", 2, 2, 60.5)
    assert row.deviation == pytest.approx(0.5**0.5)


@pytest.mark.parametrize("link", ["rr/a", "rr/a/RTE", "rr/a/RTE/b16-lr2e-05-e3-s1"])
def test_a_job_behind_a_link_counts(tmp_path, monkeypatch, link) -> None:
    for seed in (0, 1):
        job(tmp_path / "rr/a", "RTE", seed, {"accuracy": 60.0 + seed})
    (tmp_path / link).rename(tmp_path / "archive")
    (tmp_path / link).symlink_to(tmp_path / "archive")
    (tmp_path / "rr/again").symlink_to(tmp_path / "archive")
    (tmp_path / "rr/circle").symlink_to(tmp_path / "rr")
    monkeypatch.chdir(tmp_path)
    (row,) = report.rows(report.results(["rr"]))
    assert (row.run, row.jobs, row.mean) == ("rr/a", 2, 60.5)


def test_a_link_that_leads_far_away_is_not_followed_far(tmp_path) -> None:
    job(tmp_path / "rr/a", "RTE", 0, {"accuracy": 60.0})
    for above in ("far", "far/off"):
        job(tmp_path / above / "b", "RTE", 1, {"accuracy": 61.0})
    (tmp_path / "rr/far").symlink_to(tmp_path / "far")
    assert len(report.results([tmp_path / "far"])) == 2
    assert len(report.results([tmp_path / "rr"])) == 2  # of three


@pytest.mark.parametrize("named", [["rr"], ["rr", "far/off/by/a"], ["far/off/by/a", "rr"]])
def test_a_link_above_a_run_hides_it_from_no_other_way_to_it(tmp_path, monkeypatch, named) -> None:
    job(tmp_path / "rr/b", "RTE", 0, {"accuracy": 60.0})
    job(tmp_path / "far/off/by/a", "RTE", 1, {"accuracy": 61.0})
    (tmp_path / "rr/archive").symlink_to(tmp_path / "far")
    if len(named) == 1:
        (tmp_path / "rr/run").symlink_to(tmp_path / "far/off/by/a")
    monkeypatch.chdir(tmp_path)
    assert sorted(r.value for _, r in report.results(named)) == [60.0, 61.0]


@pytest.mark.parametrize("gone", ["rr/a/RTE/b16-lr2e-05-e3-s1", "rr/a/RTE", "rr/a"])
def test_a_link_to_nothing_is_told(tmp_path, capsys, gone) -> None:
    job(tmp_path / "rr/b", "RTE", 0, {"accuracy": 60.0})
    (tmp_path / gone).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / gone).symlink_to(tmp_path / "archive")
    (tmp_path / "rr/b/.#notes").symlink_to("somebody@somewhere.1")  # an editor's lock
    (row,) = report.rows(report.results([tmp_path / "rr"]))
    assert row.jobs == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("warning: left out:") and str(tmp_path / gone) in said


def test_a_folder_that_may_not_be_read_is_told(tmp_path, monkeypatch, capsys) -> None:
    for task in ("RTE", "MRPC"):
        job(tmp_path / "run", task, 0, {"accuracy": 60.0})
    plain = os.scandir

    def scandir(path):
        if str(path).endswith("RTE"):
            raise PermissionError(13, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", scandir)
    (row,) = report.rows(report.results([tmp_path / "run"]))
    assert row.task == "MRPC"
    said = f"warning: left out: {tmp_path / 'run/RTE'}: Permission denied\n"
    assert capsys.readouterr().err == said

    def is_dir(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", is_dir)
    assert main(["report", str(tmp_path / "run")]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path / 'run'}: Permission denied\n"


def test_every_measure_of_the_paper_has_a_row(tmp_path, capsys) -> None:
    run = tmp_path / "run"
    job(run, "MNLI", 0, {"accuracy": 84.0, "accuracy-mm": 83.0})
    job(run, "STS-B", 0, {"spearman": 85.0, "pearson": 86.0})
    job(run, "MRPC", 0, {"f1": 88.0, "accuracy": 84.0})
    job(run, "MRPC", 1, {"f1": 89.0, "accuracy": 83.0})
    job(run, "SQuAD-1.1", 0, {"exact": 80.0, "f1": 88.0}, main="f1")
    job(run, "SQuAD-2.0", 0, {"f1": 76.0, "exact": 73.0, "has_answer_f1": 70.0})
    job(run, "NER-weighted_sum", 0, {"f1": 95.0, "recall": 94.0}, {"f1": 91.0, "recall": 90.0})
    job(run, "SWAG", 0, {"accuracy": 80.0})
    job(run, "mine", 0, {"score": 7.0, "other": 8.0, "f1/class": 9.0})
    assert main(["report", str(run)]) == 0
    with (run / "report.csv").open() as file:
        rows = {(r["task"], r["measure"]): r for r in csv.DictReader(file)}
    assert {k: (float(r["best"]), r["base"], r["large"]) for k, r in rows.items()} == {
        ("MNLI", "accuracy"): (84, "84.60", "86.70"),
        ("MNLI", "accuracy-mm"): (83, "83.40", "85.90"),
        ("STS-B", "spearman"): (85, "85.80", "86.50"),
        ("STS-B", "pearson"): (86, "", ""),
        ("MRPC", "f1"): (89, "88.90", "89.30"),
        ("MRPC", "accuracy"): (83, "", ""),  # of the job with the best F1
        ("SQuAD-1.1", "f1"): (88, "88.50", "90.90"),
        ("SQuAD-1.1", "exact"): (80, "80.80", "84.10"),
        ("SQuAD-2.0", "f1"): (76, "", "81.90"),
        ("SQuAD-2.0", "exact"): (73, "", "78.70"),
        ("SWAG", "accuracy"): (80, "81.60", "86.60"),
        ("NER-weighted_sum", "f1"): (95, "95.50", ""),
        ("NER-weighted_sum", "test f1"): (91, "", ""),
        ("mine", "score"): (7, "", ""),
        ("mine", "other"): (8, "", ""),
    }
    assert rows["MRPC", "accuracy"]["median"] == "83.50"
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert "MRPC  b16 lr2e-05 e3: seeds 2 (0 failed), jobs 2 (0 failed)" in printed
    assert len((run / "report.md").read_text().splitlines()) == len(rows) + 4


@pytest.mark.parametrize(
    ("task", "records", "base"),
    [("SST-2", 872, 93.5), ("SST-2", 871, None), ("NER", 3250, 96.4), ("NER-last", 9, None)],
)
def test_other_data_stand_without_the_paper_s_numbers(task, records, base, tmp_path, capsys):
    job(tmp_path, task, 0, {"f1": 60.0, "accuracy": 60.0}, records={"train": 9, "dev": records})
    if task in ("SST-2", "NER"):
        main_measure = next(iter(PAPER[task]))
        assert papers_score(task, main_measure, {"dev": records})[0] == base
    found = report.rows(report.results([tmp_path]))
    assert max((r.base for r in found if r.base), default=None) == base
    assert main(["report", str(tmp_path)]) == 0
    for text in (capsys.readouterr().out, (tmp_path / "report.md").read_text()):
        assert ("BASE*" in text) == ("* the paper's" in text) == (base is not None)


def test_main_measure_chooses_the_setting_and_test_scores_choose_nothing(tmp_path) -> None:
    """Test scores are those of the best job on dev; a median only where every seed has one."""
    job(tmp_path, "NER", 0, {"f1": 94.0}, {"f1": 91.0})
    job(tmp_path, "NER", 1, {"f1": 95.0}, {"f1": 90.0})
    job(tmp_path, "NER", 2, {"f1": 93.0})
    job(tmp_path, "NER", 0, {"f1": 92.0}, {"f1": 99.0}, learning_rate=5e-5)
    dev, test = report.rows(report.results([tmp_path]))
    assert (dev.measure, dev.best, dev.median, dev.base, dev.large) == ("f1", 95, 94, 96.4, 96.6)
    assert (test.measure, test.best, test.base, test.large) == ("test f1", 90, 92.4, 92.8)
    assert test.median is test.mean is test.deviation is None
    assert dev.setting == test.setting == "b16 lr2e-05 e3"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not JSON"),
        (b'{"task": "RT', "not JSON"),
        (b'{"task": "\xff"}', "not JSON"),
        (b"[]", "not a JSON object"),
        (b"{}", "task: required key is missing"),
        ({"scores": [1]}, "scores: "),
        ({"scores": {"accuracy": None}}, "scores.accuracy: "),
        ({"scores": {"f1": 1.0}}, "main: 'accuracy' is not among the scores"),
        ({"batch_size": "many"}, "batch_size: "),
    ],
)
def test_a_damaged_result_is_named_and_left_out(tmp_path, capsys, content, message) -> None:
    job(tmp_path, "RTE", 0, {"accuracy": 60.0})
    damaged = job(tmp_path, "RTE", 1, {"accuracy": 61.0}) / "result.json"
    if isinstance(content, dict):
        content = json.dumps(json.loads(damaged.read_text()) | content).encode()
    damaged.write_bytes(content)
    assert main(["report", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "jobs 1 (0 failed)" in shown.out
    assert shown.err.startswith(f"warning: job left out: {damaged}: {message}")
    assert shown.err.count("\n") == 1


@pytest.mark.parametrize("copy", ["RTE/b16-lr2e-05-e3-s0.bak", "RTE/b16-lr2e-05-e3-s1", "RTE.bak"])
def test_a_copy_of_a_job_is_no_other_seed(tmp_path, capsys, copy) -> None:
    folder = job(tmp_path / "run", "RTE", 0, {"accuracy": 60.0})
    copied = shutil.copytree(folder.parent if "/" not in copy else folder, tmp_path / "run" / copy)
    assert main(["report", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    assert "jobs 1 (0 failed)" in shown.out and shown.err.count("\n") == 1
    assert shown.err.startswith(f"warning: job left out: {copied}")
    assert "result.json: is of the job RTE/b16-lr2e-05-e3-s0 and counts in" in shown.err


@pytest.mark.parametrize("out", ["file", "file/below", "folder"])
def test_an_out_that_cannot_be_written_is_one_line(tmp_path, capsys, out) -> None:
    job(tmp_path / "run", "RTE", 0, {"accuracy": 60.0})
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder/report.csv").mkdir(parents=True)
    assert main(["report", str(tmp_path / "run"), "--out", str(tmp_path / out)]) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith(f"error: {tmp_path / out}") and shown.err.count("\n") == 1
    assert " directory" in shown.err or "no folder" in shown.err
    assert "60.00" in shown.out


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("report.md", "# My thesis\n"),
        ("report.csv", "# My thesis\n"),
        ("report.md", "| run | task | my verdict |\n"),
        ("report.csv", "run,task,score,notes\n"),
        ("report.csv", ",".join([*report.COLUMNS, "notes"]) + "\n"),
    ],
)
def test_a_report_takes_no_other_file_s_place(tmp_path, capsys, name, text) -> None:
    job(tmp_path / "run", "RTE", 0, {"accuracy": 60.0})
    arguments = ["report", str(tmp_path / "run"), "--out", str(tmp_path)]
    (tmp_path / name).write_text(text)
    assert main(arguments) == 2
    assert f"{name}: is there, and is no earlier one" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == text
    assert len(list(tmp_path.glob("report.*"))) == 1
    (tmp_path / name).unlink()
    assert main(arguments) == main(arguments) == 0


def test_seeds_of_another_content_are_named_and_left_out(tmp_path, capsys) -> None:
    for seed, digest in enumerate("aab"):
        job(tmp_path, "RTE", seed, {"accuracy": 60.0 + seed}, made_of={"encoder": digest})
    job(tmp_path, "MRPC", 0, {"accuracy": 70.0, "f1": 80.0}, made_of={"encoder": "b"})
    assert main(["report", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "s2/result.json: was made of another content of encoder than" in err
    assert err.count("warning: ") == 1 and "62.00" not in out and "61.00" in out


def test_a_missing_folder_does_not_stop_the_report(tmp_path, capsys) -> None:
    job(tmp_path / "run", "RTE", 0, {"accuracy": 60.0})
    kept = {tmp_path / f"run/report.{end}": tmp_path / f"old.{end}" for end in ("md", "csv")}
    assert main(["report", str(tmp_path / "run")]) == 0
    for path, old in kept.items():
        path.write_text(path.read_text() + "old")
        old.hardlink_to(path)
    capsys.readouterr()
    assert main(["report", str(tmp_path / "none"), str(tmp_path / "run")]) == 0
    # Written beside the old ones and renamed, which stay whole until then.
    assert all(old.read_text() == path.read_text() + "old" for path, old in kept.items())
    shown = capsys.readouterr()
    assert "60.00" in shown.out
    assert shown.err == f"warning: left out: {tmp_path / 'none'}: no such folder\n"
    assert (tmp_path / "run/report.md").exists() and not (tmp_path / "none").exists()
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "error: " in capsys.readouterr().err


def test_the_paper_s_ablations_stand_beside_ours(tmp_path, capsys) -> None:
    """By the pretraining run of each result; of a run its last checkpoint, random weights aside."""
    size, diverged = "ablations/table6_1_256_4", "ablations/table6_4_320_5"
    for name, loss in (("mini", 3.0), (size, 4.0), (diverged, 1e4)):
        (tmp_path / name).mkdir(parents=True)
        recorder = Recorder(tmp_path / name, 0, active=True)
        for step in (10, 20):
            scores = {"heldout/mlm_loss": loss - step / 10, "heldout/mlm_accuracy": 0.1}
            recorder.write(step, scores)
            recorder.write(step, {"train/loss": 9.0})
        recorder.close()

    def of(name: str, folder: str, step: int = 20, **changes):
        return {
            "run": tmp_path / folder,
            "encoder": f"{tmp_path}/{name}/checkpoints/step-{step:08}",
        } | changes

    mini, ltr = of("mini", "a"), of("ablations/table5_left_to_right", "b")
    for seed, accuracy in enumerate((80.0, 82.0)):
        job(task="MNLI", seed=seed, scores={"accuracy": accuracy, "accuracy-mm": 1.0}, **mini)
    job(task="MNLI", seed=0, scores={"accuracy": 11.0}, **of("mini", "c", step=10))
    job(task="MNLI", seed=0, scores={"accuracy": 12.0}, **of("mini", "d", init="random"))
    job(task="SQuAD-1.1", seed=0, scores={"f1": 60.0}, **ltr)
    job(task="SQuAD-1.1", seed=1, scores={"f1": 70.0}, **ltr | {"trained": "all + BiLSTM"})
    mrpc = {"f1": 1.0, "accuracy": 70.0}
    job(task="MRPC", seed=0, scores=mrpc, **of(size, "e"))
    job(task="MRPC", seed=0, scores=mrpc, **of(diverged, "h"))
    far = f"{tmp_path}/mini/checkpoints/step-{'9' * 5000}"
    job(task="MRPC", seed=0, scores=mrpc, run=tmp_path / "i", encoder=far)
    job(task="NER-concat_last_four", seed=0, scores={"f1": 50.0}, **mini | {"trained": "features"})
    other = {"accuracy": 13.0}
    job(task="MNLI", seed=0, scores=other, **of("mini/copy", "f"))
    job(task="MNLI", seed=0, scores=other, **of("mini", "g", encoder=str(tmp_path / "mini/out")))
    assert main(["ablations", str(tmp_path)]) == 0
    printed, said = capsys.readouterr()
    (strange,) = re.findall("no line of the tables is of (.*?); theirs are (.*)", said)
    assert strange[0].split(", ") == ["copy", "out"] and "mini" in strange[1].split(", ")
    (tmp_path / "nothing").mkdir()
    assert main(["ablations", str(tmp_path / "nothing")]) == 2
    assert f"error: {tmp_path}/nothing: no finished job" in capsys.readouterr().err
    assert max(map(len, printed.splitlines())) <= 80
    lines = [line.split() for line in printed.splitlines()]
    at = {" ".join(line[:2]): n for n, line in reversed(list(enumerate(lines)))}
    mnli = "81.0+-1.4/2"
    assert lines[at["masked, NSP"]] == ["masked,", "NSP", mnli, "-", "-", "-", "-"]
    assert lines[at["masked, NSP"] + 1] == ["paper", "84.4", "88.4", "86.7", "92.7", "88.5"]
    assert lines[at["left to"]][3:] == ["-", "-", "-", "-", "60.0+-0.0/1"]
    assert lines[at["+ BiLSTM"]][2:] == ["-", "-", "-", "-", "70.0+-0.0/1"]
    assert lines[at["1-256-4 7.39"]] == ["1-256-4", "7.39", "-", "70.0+-0.0/1", "-"]
    assert lines[at["4-256-4 2.72"]] == ["4-256-4", "2.72", mnli, "-", "-"]
    assert lines[at["4-320-5 -"]] == ["4-320-5", "-", "-", "70.0+-0.0/1", "-"]
    assert lines[at["8-320-5 -"] + 1] == ["24-1024-16", "3.23", "86.6", "87.8", "93.7"]
    assert lines[at[f"80-10-10 {mnli}"]] == ["80-10-10", mnli, "-", "50.0+-0.0/1"]


@pytest.mark.parametrize("same", [True, False])
def test_two_runs_of_one_name_are_not_one(tmp_path, capsys, same) -> None:
    for n in range(2):
        path = str(tmp_path / f"at{n}/mini/checkpoints/step-00000020")
        made_of = {path: "digest" if same else f"digest {n}", "dev.tsv": "digest"}
        run, scores = tmp_path / f"results/{n}", {"accuracy": 80.0 + 2 * n}
        job(run, "MNLI", n, scores, encoder=path, made_of=made_of)
    assert main(["ablations", str(tmp_path / "results")]) == (0 if same else 2)
    said = capsys.readouterr()
    assert "81.0+-1.4/2" in said.out if same else "error: two runs are named mini: " in said.err


def test_two_runs_of_one_name_whose_steps_differ_are_refused(tmp_path, capsys) -> None:
    for n, step in enumerate((8, 12)):
        job(tmp_path / f"r{n}", "MNLI", n, {"accuracy": 80.0},
            encoder=str(tmp_path / f"at{n}/mini/checkpoints/step-{step:08d}"))  # fmt: skip
    assert main(["ablations", str(tmp_path)]) == 2
    assert "error: two runs are named mini: " in capsys.readouterr().err
    assert main(["ablations", str(tmp_path / "r0")]) == 0


def test_two_contents_of_one_path_are_no_two_seeds_wherever_it_was(tmp_path, capsys) -> None:
    gone = "runs/mini/checkpoints/step-00000020"  # of two hosts
    for n in range(2):
        made = {"encoder": gone, "made_of": {gone: f"digest {n}"}}
        job(tmp_path / f"r{n}", "MNLI", n, {"accuracy": 80.0}, **made)
    assert main(["ablations", str(tmp_path)]) == 2
    said = f"error: {tmp_path}/r0 and {tmp_path}/r1 have results of different contents of {gone};"
    assert capsys.readouterr().err.startswith(said)
    assert main(["ablations", str(tmp_path / "r0")]) == 0


def test_a_run_is_one_however_its_path_is_written(tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for n, (place, step) in enumerate(((".", 8), (tmp_path, 12), (f"../{tmp_path.name}", 8))):
        job(tmp_path / f"r{n}", "MNLI", n, {"accuracy": 80.0},
            encoder=f"{place}/mini/checkpoints/step-{step:08d}")  # fmt: skip
    assert main(["ablations", str(tmp_path)]) == 0
    assert "80.0+-0.0/1" in capsys.readouterr().out


def test_a_perplexity_is_of_the_weights_that_were_fine_tuned(tmp_path, capsys) -> None:
    encoder, runs = tmp_path / "mini/checkpoints/step-00000020", tmp_path / "runs"
    make_files(tmp_path)
    tiny.encoder(encoder)
    recorder = Recorder(tmp_path / "mini", 0, active=True)
    recorder.write(20, {"heldout/mlm_loss": 1.0, "heldout/mlm_accuracy": 0.1})
    recorder.close()

    def finetuned(folder: str) -> None:
        settings = config(tmp_path, runs / folder, path=str(encoder), dropout=0.2)
        content = loading.read(settings.encoder, 8).digest
        made = {"encoder": str(encoder), "made_of": {str(encoder): content}}
        job(runs / folder, "MRPC", len(folder), {"accuracy": 70.0}, **made)
        (runs / folder / "config.yaml").write_text(dump(settings))

    def printed() -> tuple[bool, str]:
        assert main(["ablations", str(runs)]) == 0
        out, err = capsys.readouterr()
        assert "70.0+-0.0/1" in out
        return re.search(r"4-256-4 +2\.72", out) is not None, err

    finetuned("a")
    assert printed() == (True, "")
    metrics = tmp_path / "mini/metrics.jsonl"
    measured = metrics.rename(tmp_path / "measured")
    metrics.mkdir()
    shown, said = printed()
    assert not shown and said.startswith(f"warning: no perplexity of {encoder}: {metrics}: ")
    metrics.rmdir()
    measured.rename(metrics)
    encoder.rename(tmp_path / "old")
    shown, said = printed()
    assert not shown and f"warning: no perplexity of {encoder}: encoder.path: " in said
    tiny.encoder(encoder, intermediate_size=32)
    said = f"warning: no perplexity of {encoder}: the results in {runs}/a are of another content\n"
    assert printed() == (False, said)
    finetuned("bb")
    assert main(["ablations", str(runs)]) == 2
    said = f"error: {runs}/a and {runs}/bb have results of different contents of {encoder}; give"
    assert capsys.readouterr().err.startswith(said)


def test_a_copied_job_is_no_second_seed(tmp_path, capsys) -> None:
    for n in range(2):
        job(tmp_path / f"{n}", "MNLI", 3, {"accuracy": 80.0}, encoder=f"{tmp_path}/mini")
    assert main(["ablations", str(tmp_path / "0")]) == 0
    assert main(["ablations", str(tmp_path)]) == 2
    said = "error: 2 results of mini are of MNLI, b16 lr2e-05 e3, seed 3; give"
    assert capsys.readouterr().err.startswith(said)
