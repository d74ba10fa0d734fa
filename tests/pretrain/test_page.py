"""The page of a run says what its files say, and a foreign name in them is text."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.load import check, dump, load
from core.errors import UserError
from pretrain import page, report
from pretrain.__main__ import main as command
from pretrain.checkpoint import Checkpoints
from pretrain.config import CheckpointConfig, PretrainConfig
from pretrain.distributed import World
from pretrain.report import main
from pretrain.run_state import Position, State

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
        losses["train/grad_norm"] = step**2
        lines.append({"step": step, "time": 100.0 + step, **losses, **rates})
        trust = {"trust_ratio_output.dense.weight/layer_00": 0.1 * step}
        lines.append({"step": step, "time": 100.0 + step, **trust})
    scores = {"heldout/mlm_loss": 4.25, "heldout/mlm_accuracy": 0.31, "heldout/max_seq_len": 64}
    lines.append({"step": 40, "time": 141.0, **scores})
    for step in STEPS:
        guesses = [[f"w{step}", 0.5], ["<p>", 0.25], ["third", 0.1]]
        filled = [{"sentence": "a ____ b", "word": "<em>", "guesses": guesses}]
        if step != 30:  # the places of the others move, as where more sentences are asked for
            filled.insert(0, {"sentence": "____", "word": "other", "guesses": guesses[:1]})
        lines.append({"step": step, "time": 142.0, "fill_in": filled})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_run_is_read_as_it_was_recorded(tmp_path: Path) -> None:
    found = page.read(run(tmp_path / "a"), now=150.0)
    assert found.column("step").tolist() == list(STEPS)
    assert found.hours * 3600 == pytest.approx(np.array([20, 40, 80, 120]))
    assert found.at(found.hours * 3600, [30]) == pytest.approx(80)
    assert found.trust == {("layer_00", "output.dense.weight"): pytest.approx(4.0)}
    assert np.isnan(found.column("nothing")).all()


def test_a_turned_bit_in_the_name_of_a_measure_is_shown_as_a_gap(tmp_path: Path, capsys) -> None:
    folder = run(tmp_path / "a")
    records = folder / "metrics.jsonl"
    tags = "heldout/books/mlm_loss", "heldout/books/mlm_accuracy"
    mine = f'"{tags[0]}": 4.5, "{tags[1]}": 0.25, "heldout/mlm_l'
    whole = records.read_text().replace('"heldout/mlm_l', mine, 1)

    def said(text: str) -> list[list[str]]:
        records.write_text(text)
        assert main([str(folder)]) == 0
        return [line.split() for line in capsys.readouterr().out.splitlines()]

    assert ["64", "books", "25.0%", "4.500"] in said(whole)
    for tag, gap in zip(tags, (["25.0%", "-"], ["-", "4.500"]), strict=True):
        at = whole.index(tag)
        for place in range(at, at + len(tag)):
            lines = said(whole[:place] + chr(ord(whole[place]) ^ 1) + whole[place + 1 :])
            assert ["64", "books", *gap] in lines


def test_a_folder_whose_name_is_no_utf_8_has_a_page(tmp_path: Path) -> None:
    folder, file = run(tmp_path / "caf\udce9"), tmp_path / "page.html"
    page.write([str(folder)], file)
    assert "caf\\udce9" in file.read_text("utf-8")


def test_the_page_is_one_small_file_without_a_script(tmp_path: Path) -> None:
    folder, file = run(tmp_path / "<script>x"), tmp_path / "page.html"
    page.write([str(folder)], file, now=150.0)
    text = file.read_text()
    assert len(text) < 1_000_000 and text.count("<svg") == 4
    filled = "<td>a ____ b</td><td>&lt;em&gt;</td>"
    assert filled + "".join(f"<td>w{n} 50%, `&lt;p&gt;` 25%</td>" for n in (10, 30, 40)) in text
    assert "<td>other</td><td>w10 50%</td><td>-</td><td>w40 50%</td>" in text
    assert "mathdefault" not in text and ">1000<" in text
    assert "<script" not in text and "&lt;script&gt;x" in text and "&lt;b&gt;" in text
    assert not re.search(r'(?:src|href)="(?!#)(?!data:)', text)
    for said in ("4.250 nats, 31.0% of words right (step 40)", "40.0 M", "2:00", "trust ratios"):
        assert said in text
    page.write([str(folder)], tmp_path / "again.html", now=150.0)
    assert (tmp_path / "again.html").read_text() == text


def test_several_runs_show_the_keys_that_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [
        run(tmp_path / "a", num_hidden_layers=2),
        run(tmp_path / "<i>$\\x$", num_hidden_layers=3),
    ]
    file = tmp_path / "page.html"
    assert main([*map(str, folders), "--html", str(file)]) == 0
    cells = re.findall(r"<td>([\w.]+)</td><td>([^<]*)</td><td>([^<]*)</td>", file.read_text())
    keys = {key: (a, b) for key, a, b in cells}
    assert not keys.keys() & {"run_dir", "data.ledger"}
    assert "held-out, 64" in file.read_text()  # what its marker means
    assert "<i>" not in file.read_text()
    assert keys["model.num_hidden_layers"] == ("2", "3")
    assert "seed" not in keys and "model.hidden_size" not in keys
    for more, said in (
        ([], "several runs .* by --html"), (["--data", "d"], "--data: .* --score"),
        (["--scores", "s"], "--scores: .* --html"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=said):
            main([*map(str, folders), *more])


def save(folder: Path, **facts: object) -> None:
    """A checkpoint of the step that a run stands at."""
    alone = World(0, 1, 0, 1, "alone", torch.device("cpu"), None)
    keeper = Checkpoints(folder, alone, CheckpointConfig(asynchronous=False))
    saved = State(Position(step=40), None, {}, {"dataset_id": f"d-{folder.name}"}, 1, **facts)

    def write(to: Path) -> list[str]:
        (to / "weights").write_bytes(b"x")
        return ["weights"]

    keeper.save(saved, b"[PAD]\n", lambda: write)


def test_code_and_data_that_differ_are_shown(tmp_path: Path) -> None:
    folders = [run(tmp_path / "a"), run(tmp_path / "b")]
    for folder, code in zip(folders, ("c0de1", "c0de2"), strict=True):
        save(folder, code_version=code)
    page.write([*map(str, folders)], file := tmp_path / "page.html", now=150.0)
    text = file.read_text()
    assert "<td>code</td><td>c0de1</td><td>c0de2</td>" in text
    assert "<td>data set</td><td>d-a</td><td>d-b</td>" in text


def probe(folder: Path, **scores: float) -> None:
    """Scores of a run's checkpoint at step 20, as `finetune follow` writes them."""
    line = {"step": 20, "time": 130.0} | {f"probe/SST-2/{k}": v for k, v in scores.items()}
    (folder / "probes.jsonl").write_text(json.dumps(line) + "\n")


def test_checkpoints_that_were_fine_tuned_have_a_picture(tmp_path: Path) -> None:
    folders, file = [run(tmp_path / name) for name in "ab"], tmp_path / "page.html"
    for folder, scores in zip(folders, ({"accuracy": 81.0, "<i>": 3.0}, {}), strict=True):
        probe(folder, **scores)
        page.write([str(folder)], file, now=150.0)
        text = file.read_text()
        assert ("Fine-tuned checkpoints" in text) == bool(scores) and "<i>" not in text
        assert (">SST-2/accuracy<" in text, text.count("<svg")) == (bool(scores), 4 + bool(scores))
    page.write([*map(str, folders)], file, now=150.0)
    assert file.read_text().count("Fine-tuned checkpoints") == 2  # over tokens and over hours
    assert file.read_text().count(">a, SST-2/accuracy<") == 2


def test_a_run_that_is_named_twice_is_drawn_once(tmp_path: Path) -> None:
    folder, files = run(tmp_path / "a"), [tmp_path / "once.html", tmp_path / "twice.html"]
    page.write([str(folder)], files[0], now=150.0)
    page.write([str(folder), f"{folder}/../a"], files[1], now=150.0)
    assert files[0].read_text() == files[1].read_text()


def test_what_a_start_changed_is_read_as_old_and_new(tmp_path: Path) -> None:
    folder = run(tmp_path / "a")
    phases = [[{"steps": 20}], [{"steps": 20}, {"steps": 9}]]
    event = {"event": "resume", "step": 20, "world_size": 1}
    event["changed"] = {"seed": [1, 2], "phases": phases}
    begun = [{"event": "phase", "step": n, "phase": n // 20} for n in (0, 10, 20, 20)]
    save(folder, history=(*begun[:3], event, begun[3]))
    page.write([str(folder)], file := tmp_path / "page.html", now=150.0)
    text = file.read_text()
    assert "<td>world_size: 1, phases.1.steps: - -&gt; 9, seed: 1 -&gt; 2</td>" in text
    assert "(1 rank at" in text and "started again" in text
    # A phase is told once, whatever starts repeat it.
    assert [text.count(f"<td>phase: {n}</td>") for n in (0, 1, 2)] == [0, 1, 1]


def test_the_figures_stand_by_length_and_no_heading_without_a_body(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run(tmp_path / "a")
    scores = {"heldout/mlm_loss": 5.0, "heldout/mlm_accuracy": 0.2, "heldout/max_seq_len": 16}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 40, "time": 150.0, **scores}) + "\n")
    main([str(folder)])
    told = capsys.readouterr().out
    assert re.findall(r"^ +(\d+) +[\d.]+%", told, re.M) == ["16", "64"]
    assert "Fill in the blank" in told
    main([str(folder), "--json"])
    assert json.loads(capsys.readouterr().out)["mlm_loss"] == 5.0  # the phase's length, the last
    main([str(folder), "--sentences", "0"])
    assert "Fill in the blank" not in capsys.readouterr().out


@pytest.mark.parametrize("made", [False, True])
def test_a_folder_that_is_no_run_is_named(tmp_path: Path, made: bool) -> None:
    folder = tmp_path / "none"
    if made:
        folder.mkdir()
    with pytest.raises(UserError, match="none: no run folder"):
        main([str(folder)])


def test_a_link_that_leads_to_itself_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="loop/config.yaml: Too many levels of symbolic links"):
        main([str(tmp_path / "loop"), "--html", str(tmp_path / "page.html")])


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("thesis.docx", "mine", "ends in .html"),
        ("state.json", None, "ends in .html"),
        ("page", None, "ends in .html"),
        ("..", None, "ends in .html"),
        ("index.html", "<!DOCTYPE html><html><p>mine", "is no earlier one"),
    ],
)
def test_a_page_takes_no_other_file_s_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: str | None, said: str
) -> None:
    folder, file = run(tmp_path / "a"), tmp_path / name
    if content is not None:
        file.write_text(content)
    there = sorted(tmp_path.iterdir())
    assert command(["report", str(folder), "--html", str(file)]) == 2
    shown = capsys.readouterr().err
    assert shown.startswith("error: ") and said in shown and shown.count("\n") == 1
    assert sorted(tmp_path.iterdir()) == there
    assert content is None or file.read_text() == content


def test_a_page_takes_the_place_of_an_earlier_one(tmp_path: Path) -> None:
    folder, file = run(tmp_path / "a"), tmp_path / "page.HTM"
    file.touch()
    for _ in range(2):
        assert main([str(folder), "--html", str(file)]) == 0
        assert file.read_text().endswith("</html>\n")


def test_every_fine_tuning_job_is_a_point(tmp_path: Path) -> None:
    job = {"task": "SST-2", "main": "accuracy", "scores": {"accuracy": 90.5}, "batch_size": 8}
    for seed, score in enumerate((90.5, 91.0, 50.0)):
        folder = tmp_path / f"glue/SST-2/b8-s{seed}"
        folder.mkdir(parents=True)
        found = job | {"scores": {"accuracy": score}, "failed": score == 50}
        (folder / "result.json").write_text(json.dumps(found))
    rows = page.strips([str(tmp_path / "glue")])
    assert [job.scores["accuracy"] for job in rows["SST-2, accuracy"]] == [90.5, 91.0, 50.0]
    folder, file = run(tmp_path / "a"), tmp_path / "page.html"
    assert main([str(folder), "--html", str(file), "--scores", str(tmp_path / "glue")]) == 0
    text = file.read_text()
    assert text.count("<svg") == 5 and "SST-2, accuracy (3)" in text and "paper" not in text
    for paper, drawn in ((93.5, True), (90.0, False)):  # the third job says nothing of it
        for seed, base in enumerate((93.5, paper)):
            papers = job | {"paper": [base, None]}
            (tmp_path / f"glue/SST-2/b8-s{seed}/result.json").write_text(json.dumps(papers))
        assert main([str(folder), "--html", str(file), "--scores", str(tmp_path / "glue")]) == 0
        text = file.read_text()
        assert ("the paper's BASE and LARGE" in text) is (">B<" in text) is drawn
        assert ">L<" not in text
    with pytest.raises(UserError, match="a: no finished job"):
        page.strips([str(folder)])
    (tmp_path / "glue/SST-2/b8-s0/result.json").write_text(json.dumps(job | {"main": "f1"}))
    with pytest.raises(UserError, match="result.json: main: 'f1' is not among"):
        page.strips([str(tmp_path / "glue")])


def test_a_preset_stands_beside_its_record() -> None:
    root = Path(page.__file__).parents[1]
    for name, last in (("demo", (4400, 512)), ("mini", (4400, 128))):
        wanted = ["phases.1.steps=7", "seed=1", "run_dir=x"]
        config = load(root / f"configs/pretrain_{name}.yaml", PretrainConfig, wanted)
        curve = page.recorded_curve(config)
        assert (curve[-1]["step"], curve[-1]["length"]) == last
        assert all(0 < p["mlm_accuracy"] < 1 < p["mlm_loss"] < 8 for p in curve)
        other = load(
            root / f"configs/pretrain_{name}.yaml", PretrainConfig, ["model.type_vocab_size=3"]
        )
        assert page.recorded_curve(other) == []


def test_a_run_without_a_record_is_named(tmp_path: Path) -> None:
    folder = run(tmp_path / "a")
    (folder / "metrics.jsonl").write_text('{"step": 1, "time": 2}\n')
    with pytest.raises(UserError, match="a/metrics.jsonl: no step is recorded"):
        page.write([str(folder)], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_the_published_figures_stand_beside_their_recipe_alone() -> None:
    file = Path(page.__file__).parents[1] / "configs/pretrain_large.yaml"
    for change, published in (
        ("data.dir=other", True), ("phases.1.steps=7", True),
        ("phases.0.learning_rate=1e-4", False), ("data.next_sentence=none", False),
        ("optimizer.name=adamw", False), ("phases.1.sequences_per_step=64", False),
    ):  # fmt: skip
        config = load(file, PretrainConfig, [change])
        assert page.is_published_recipe(config) is published, change


def test_the_advice_of_the_report_is_of_commands_that_run(tmp_path: Path) -> None:
    """Also where the name of the folder has spaces or marks of a shell."""
    run = tmp_path / "my runs" / "a $b"
    lines = report.text(report.Learned(str(run), 1, {}, [], {}), run).split("\n")
    (board,) = [line for line in lines if "--logdir" in line]
    assert shlex.split(board)[-1] == str(run.parent)
    sets = [shlex.split(line) for line in lines if "--set" in line]
    assert [words[1] for words in sets] == [f"encoder.path={run}"] * 2
