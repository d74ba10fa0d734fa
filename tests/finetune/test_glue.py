"""GLUE files: every official layout is read, every bad record is counted and named."""

from __future__ import annotations

import numpy as np
import pytest
import tokenizers

from core.errors import UserError
from finetune.config import GlueConfig, TrainConfig
from finetune.examples import fit
from finetune.glue import TASKS, Glue, read
from finetune.metrics import MEASURES
from tests.finetune import tiny


def line(task, bare, index, texts, label, header):
    values = dict.fromkeys(header, "x")
    values |= dict(zip(task.texts, texts, strict=True))
    if task.index in header and not bare:
        values[task.index] = str(index)
    if label is not None:
        values[task.label] = label
    return "\t".join(values[c] for c in header)


def write(folder, name, rows=6) -> None:
    """A folder of the task in the official layout, a row of each label in turn."""
    task = TASKS[name]
    labels = task.labels or ("0.0", "2.5", "5.000")
    place = folder / name
    place.mkdir(parents=True)
    columns = [c for c in (task.index, "genre", *task.texts) if c]
    labelled = list(task.bare) or [*columns, task.label]
    for file in ("train.tsv", *(f for _, f in task.dev)):
        lines = [] if task.bare else ["\t".join(labelled)]
        for n in range(rows):
            texts = ["the cat", "a dog ran"][: len(task.texts)]
            lines.append(line(task, task.bare, n, texts, labels[n % len(labels)], labelled))
        (place / file).write_text("\n".join(lines) + "\n")
    for _, file, *_ in task.test or ((name, "test.tsv"),):
        path = (place / file).resolve()
        path.parent.mkdir(exist_ok=True)
        header = ["index", *task.texts]
        lines = ["\t".join(header)]
        for n in range(4):
            lines.append(line(task, (), n, ["the sun"] * len(task.texts), None, header))
            lines[-1] = lines[-1].replace("x", str(n), 1) if task.index != "index" else lines[-1]
        path.write_text("\n".join(lines))


@pytest.mark.parametrize("name", TASKS)
def test_every_task_from_its_files_to_the_leaderboard(name, tmp_path) -> None:
    write(tmp_path, name)
    task = Glue(name, GlueConfig(dir=str(tmp_path)), TrainConfig(), tiny.tokenizer())
    table = TASKS[name]
    assert [len(items) for items in task.sets.values()][:2] == [6, 6]
    assert len(task.test_sets) == max(1, len(table.test))
    labels = [row.label for row in task.rows["train"]]
    assert labels == (
        [0.0, 2.5, 5.0] * 2 if not table.labels else [n % len(table.labels) for n in range(6)]
    )
    item = task.sets["train"][0]
    pieces = [tiny.PIECES[i] for i in item.sequences[0].ids]
    assert " ".join(pieces) == "[CLS] the cat [SEP]" + (" a dog ran [SEP]" * (len(table.texts) - 1))
    assert item.sequences[0].types.tolist() == [0] * 4 + [1] * (4 * (len(table.texts) - 1))

    # A guess that is always right scores 100 on every measure and is not a failed run.
    width = task.head.width
    right = {
        n: [np.eye(width)[r.label] if table.labels else np.array([r.label]) for r in task.rows[n]]
        for n in task.dev_sets
    }
    score = task.score(right)
    assert all(v == pytest.approx(100) for v in score.values.values()) and not score.failed
    assert len(score.values) == len(table.metrics) * len(table.dev)
    constant = {n: [np.ones(width)] * len(v) for n, v in right.items()}
    assert task.score(constant).failed

    outputs = {
        n: [np.eye(width)[-1] if table.labels else np.array([9.0])] * 4 for n in task.test_sets
    }
    (tmp_path / "out").mkdir()
    task.write(outputs, score, tmp_path / "out")
    for set_name in task.test_sets:
        text = (tmp_path / "out" / f"{set_name.removeprefix('test ')}.tsv").read_text()
        last = table.labels[-1] if table.labels else "5.000"
        assert text == "index\tprediction\n" + "".join(f"{n}\t{last}\n" for n in range(4))


def test_bad_rows_are_counted_and_named_by_line(tmp_path) -> None:
    path = tmp_path / "train.tsv"
    path.write_bytes(
        "\ufeffindex\tsentence1\tsentence2\tlabel\n"
        '0\tthe "cat\ta dog\tentailment\n'
        "1\tthe cat\ta dog\n"
        "2\tthe cat\t \tentailment\n"
        "\n"
        "3\tthe cat\ta dog\tmaybe\n"
        "0\tthe cat\ta dog\tentailment\n"
        "4\tit\u2028is\x85\ta dog\tnot_entailment\r\n".encode()
    )
    rows, problems = read(path, TASKS["RTE"], labelled=True)
    assert [(r.index, r.texts[0], r.label) for r in rows] == [
        ("0", 'the "cat', 0),
        ("4", "it\u2028is", 1),
    ]
    assert problems.total == 7
    assert sorted(problems.lines()) == [
        f"{path}: 1 of 7 left out: {kind} (line {where})"
        for kind, where in [
            ("duplicate id", "7 '0'"),
            ("empty row", "5"),
            ("empty text", "4"),
            ("not 4 columns", "3"),
            ("unknown label", "6 'maybe'"),
        ]
    ]
    problems.check(0.8)
    with pytest.raises(UserError, match="more than train.max_bad_share 0.1"):
        problems.check(0.1)


def test_a_test_file_must_be_whole_and_columns_must_be_there(tmp_path) -> None:
    write(tmp_path, "RTE")
    path = tmp_path / "RTE" / "test.tsv"
    path.write_text("index\tsentence1\tsentence2\n0\tthe cat\n" + "1\ta dog\tit ran\n" * 200)
    with pytest.raises(UserError, match="must be whole"):
        Glue("RTE", GlueConfig(dir=str(tmp_path)), TrainConfig(), tiny.tokenizer())
    head, row = "index\tsentence1\tsentence2\n", "{}\tthe cat\ta dog\n"
    for index in ("index", "", "1.0", "-1", "q1"):
        path.write_text(head + row.format(0) + row.format(index))
        with pytest.raises(
            UserError, match=rf"no whole number .line 3 '{index}'.; a test file must"
        ):
            Glue("RTE", GlueConfig(dir=str(tmp_path)), TrainConfig(), tiny.tokenizer())
    path.write_text("index\tsentence1\n0\tthe cat\n")
    with pytest.raises(UserError, match=":1: no column sentence2, label"):
        read(path, TASKS["RTE"], labelled=True)
    path.write_text("")
    with pytest.raises(UserError, match="is empty"):
        read(path, TASKS["RTE"], labelled=True)


def test_pairs_are_cut_as_transformers_cuts_them() -> None:
    pieces = {f"w{n}": n for n in range(200)}
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(pieces, "w0"))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()

    def theirs(a, b, room):
        library.enable_truncation(room, strategy="longest_first")
        pair = library.encode(*(" ".join(f"w{n}" for n in part) for part in (a, b)))
        return [[i for i, t in zip(pair.ids, pair.type_ids, strict=True) if t == n] for n in (0, 1)]

    for la in range(0, 12):
        for lb in range(0, 12):
            for room in range(2, 14):
                a, b = list(range(la)), list(range(100, 100 + lb))
                x, y, cut = fit(a, b, room + 3)
                assert [x, y] == theirs(a, b, room)
                assert cut == (la + lb > room)
    assert fit([1, 2, 3, 4], None, 5) == ([1, 2, 3], None, True)


def glue(tmp_path, name, **changes) -> Glue:
    config = GlueConfig(dir=str(tmp_path), **changes)
    return Glue(name, config, TrainConfig(), tiny.tokenizer())


@pytest.mark.parametrize("name", ["AX", "diagnostic"])
def test_the_diagnostic_set_is_found_where_it_usually_is(name, tmp_path) -> None:
    """Also beside a link to a folder of MNLI that stands elsewhere."""
    write(tmp_path / "made", "MNLI")
    (tmp_path / "glue").mkdir()
    (tmp_path / "glue" / "MNLI").symlink_to(tmp_path / "made" / "MNLI")
    (tmp_path / "made" / "AX").rename(tmp_path / "glue" / name)
    task = glue(tmp_path / "glue", "MNLI")
    assert len(task.sets["test AX"]) == 4
    assert not [note for note in task.notes if "leaderboard" in note]


def test_the_dev_score_of_sts_b_is_that_of_its_file(tmp_path) -> None:
    write(tmp_path, "STS-B", rows=50)
    task = glue(tmp_path, "STS-B")
    gold = np.array([row.label for row in task.rows["dev"]])
    rng = np.random.Generator(np.random.Philox(key=4))
    outputs = {"dev": list((gold + rng.normal(0, 1, len(gold))).astype(np.float32)[:, None])}
    score = task.score(outputs)
    task.write(outputs, score, tmp_path)
    lines = (tmp_path / "dev.tsv").read_text().splitlines()[1:]
    written = np.array([float(line.split("\t")[1]) for line in lines])
    assert written.min() == 0 and written.max() == 5
    for name, value in score.values.items():
        assert value == 100 * MEASURES[name](gold, written), name


def test_a_file_of_one_long_line_is_a_short_error(tmp_path) -> None:
    write(tmp_path, "RTE")
    path = tmp_path / "RTE" / "train.tsv"
    for text in ("x\t" * 10**6, "y" * 10**6):
        path.write_text(text)
        with pytest.raises(UserError, match="no column sentence1") as error:
            glue(tmp_path, "RTE")
        assert len(str(error.value)) < 1000
    header = "index\tsentence1\tsentence2\tlabel\n"
    path.write_text(header + "".join(f"{n}\ta\tb\t{'z' * 10**5}\n" for n in range(4)))
    with pytest.raises(UserError, match=r"unknown label .line 2 'zzz.*\.\.\.") as error:
        glue(tmp_path, "RTE")
    assert len(str(error.value)) < 1000
