"""SQuAD: windows cover, answers come back to the character, spans are the best there are."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from configs.load import load
from core.errors import UserError
from finetune.config import FinetuneConfig, SquadConfig, TrainConfig
from finetune.squad import (
    Squad,
    Window,
    answer_tokens,
    best_spans,
    owners,
    read,
    split_by_article,
    windows,
)
from tests.finetune import tiny
from tests.pretrain.test_writer import mounted

CONFIG = Path(__file__).parents[2] / "configs/finetune_squad.yaml"
CONTEXT = (
    "Paris (1854-1855): the  Café was BIG; a king sat in it. \u201cHe saw Rome\u201d, not France!"
)


def qa(number, text, *answers, context=CONTEXT, impossible=None):
    result = {
        "id": f"q{number}",
        "question": text,
        "answers": [{"text": a, "answer_start": context.index(a)} for a in answers],
    }
    return result if impossible is None else result | {"is_impossible": impossible}


def file(path, articles) -> str:
    data = [
        {"title": str(n), "paragraphs": [{"context": CONTEXT, "qas": qas}]}
        for n, qas in enumerate(articles)
    ]
    path.write_text(json.dumps({"version": "2.0", "data": data}))
    return str(path)


def squad(tmp_path, version="2.0", **changes) -> Squad:
    questions = [
        qa(1, "who sat", "a king", impossible=False),
        qa(2, "where is rome", impossible=True),
        qa(3, "what was big", "Café", "the  Café", impossible=False),
    ]
    if version == "1.1":
        questions = [q for q in questions if q["answers"]]
    path = file(tmp_path / "squad.json", [questions])
    settings = {
        "version": version,
        "train_file": path,
        "dev_file": path,
        "max_seq_len": 32,
        "max_question_tokens": 8,
        "stride": 6,
        "max_answer_tokens": 7,
        "n_best": 5,
    }
    return Squad("SQuAD", SquadConfig(**settings | changes), TrainConfig(), tiny.tokenizer())


def test_windows_cover_everything_and_each_token_has_one_owner() -> None:
    for tokens, room, stride in itertools.product(range(0, 30), (4, 7), (1, 3, 4)):
        runs = windows(tokens, room, stride)
        assert {t for first, n in runs for t in range(first, first + n)} == set(range(tokens))
        assert all(n <= room for _, n in runs)
        assert all(b - a == stride for (a, _), (b, _) in itertools.pairwise(runs))
        owner = owners(runs, tokens)
        for t in range(tokens):
            context = {
                w: (min(t - first, first + n - 1 - t), n)
                for w, (first, n) in enumerate(runs)
                if first <= t < first + n
            }
            assert context[owner[t]][0] == max(side for side, _ in context.values())


def test_answers_come_back_to_the_character(tmp_path) -> None:
    """Every span of whole pieces that training can mark is given back as it stands in the text."""
    tokenizer = tiny.tokenizer()
    _, offsets = tokenizer.encode_with_offsets(CONTEXT)
    offsets = np.array(offsets)
    for answer in (
        "1854",
        "1854-1855",
        "Café",
        "the  Café",
        "Rome",
        "\u201cHe saw Rome\u201d",
        "France!",
    ):
        start = CONTEXT.index(answer)
        first, last = answer_tokens(offsets, start, start + len(answer))
        assert CONTEXT[offsets[first, 0] : offsets[last, 1]] == answer
    assert answer_tokens(offsets, CONTEXT.index("  ") + 1, CONTEXT.index("  ") + 1) is None


def perfect(task: Squad, set_name: str, answers: dict[str, str]) -> list[np.ndarray]:
    """Logits that point at the given text, or at [CLS]."""
    outputs = []
    for item, window in zip(task.sets[set_name], task.windows[set_name], strict=True):
        question = task.questions[set_name][window.question]
        logits = np.zeros((len(item.sequences[0].ids), 2), np.float32)
        answer = answers[question.id]
        found = None
        if answer:
            start = question.context.index(answer)
            found = answer_tokens(window.offsets, start, start + len(answer))
            ends = found and (window.offsets[found[0], 0], window.offsets[found[1], 1])
            if ends != (start, start + len(answer)):
                found = None
        if found:
            logits[window.skip + found[0], 0] = logits[window.skip + found[1], 1] = 9
        else:
            logits[0] = 5
        outputs.append(logits)
    return outputs


@pytest.mark.parametrize("version", ["1.1", "2.0"])
def test_the_right_logits_give_full_marks_and_official_files(version, tmp_path) -> None:
    task = squad(tmp_path, version)
    assert len(task.windows["dev"]) > len(task.questions["dev"])
    wanted = {"q1": "a king", "q3": "the  Café"} | ({"q2": ""} if version == "2.0" else {})
    outputs = {"dev": perfect(task, "dev", wanted)}
    score = task.score(outputs)
    assert score.values["exact"] == score.values["f1"] == 100 and not score.failed
    task.write(outputs, score, tmp_path)
    assert json.loads((tmp_path / "dev_predictions.json").read_text()) == wanted
    n_best = json.loads((tmp_path / "dev_nbest_predictions.json").read_text())
    for q, entries in n_best.items():
        assert sum(e["probability"] for e in entries) == pytest.approx(1)
        assert entries[0]["text"] == wanted[q]
        assert set(entries[0]) == {"text", "probability", "start_logit", "end_logit"}
        assert ("" in [e["text"] for e in entries]) == (version == "2.0")
    assert (tmp_path / "dev_null_odds.json").exists() == (version == "2.0")


@pytest.mark.parametrize("room", [0, 4096])
def test_a_full_disk_is_one_line_and_leaves_no_part_of_a_file(room, tmp_path) -> None:
    """Bytes that are left: none for the first file, or enough for it alone."""
    task, folder = squad(tmp_path), tmp_path / "disk"
    folder.mkdir()
    outputs = {"dev": perfect(task, "dev", {"q1": "a king", "q2": "", "q3": "the  Café"})}
    score = task.score(outputs)
    with mounted(folder, "size=64k"):
        with (folder / "stone").open("wb", buffering=0) as stone:
            stone.write(bytes(2**16 - room))
        file = "nbest_predictions" if room else "predictions"
        with pytest.raises(UserError, match=f"/dev_{file}.json: the disk is full"):
            task.write(outputs, score, folder)
        left = {path.name for path in folder.iterdir()}
        assert left == {"stone"} | ({"dev_predictions.json"} if room else set())


def test_training_labels_mark_the_answer_or_cls(tmp_path) -> None:
    task = squad(tmp_path)
    marked = set()
    for item, window in zip(task.sets["train"], task.windows["train"], strict=True):
        question = task.questions["train"][window.question]
        start, end = item.label
        if (start, end) == (0, 0):
            continue
        offsets = window.offsets[[start - window.skip, end - window.skip]]
        assert question.context[offsets[0, 0] : offsets[1, 1]] == question.answers[0][0]
        marked.add(question.id)
    assert marked == {"q1", "q3"}
    assert any(item.label == (0, 0) for item in task.sets["train"])


def test_answers_that_no_window_shows_whole_are_counted(tmp_path) -> None:
    """Longer than a window, or of characters that are no token."""
    said = "answers stand whole in no window"
    assert not any(said in note for note in squad(tmp_path).notes)
    context = "the king \u200b sat " + "on the mat " * 30
    answers = ["king", "\u200b", "on the mat " * 25]
    lines = [
        {"id": f"q{n}", "question": "who", "context": context}
        | {"answers": [{"text": text, "answer_start": context.index(text)}]}
        for n, text in enumerate(answers)
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert f"train: 2 {said}: trained as no answer" in squad(tmp_path, train_file=str(path)).notes


def test_best_spans_equal_a_search_of_all() -> None:
    rng = np.random.Generator(np.random.Philox(key=9))
    for n in (1, 2, 5, 12):
        for _ in range(10):
            logits = rng.standard_normal((n, 2)).astype(np.float32)
            owned = rng.random(n) < 0.7
            offsets = np.stack([np.arange(n), np.arange(n) + 1], 1)
            window = Window(0, 0, offsets, owned, 0)
            every = sorted(
                (-float(logits[i, 0]) - float(logits[j, 1]), i, j + 1)
                for i in range(n)
                for j in range(i, min(n, i + 4))
                if owned[i]
            )
            found = sorted((-s, a, b) for s, _, _, a, b in best_spans(logits, window, 4, 6))
            assert [x[1:] for x in found] == [x[1:] for x in every[:6]]
            assert [x[0] for x in found] == pytest.approx([x[0] for x in every[:6]])


def test_null_score_is_the_least_of_the_windows(tmp_path) -> None:
    task = squad(tmp_path)
    outputs = [np.zeros((len(i.sequences[0].ids), 2), np.float32) for i in task.sets["dev"]]
    for number, (window, logits) in enumerate(zip(task.windows["dev"], outputs, strict=True)):
        logits[0] = 10 + window.question * 100 + number
    null = {q: value for q, (value, _) in task.answers(outputs, "dev").items()}
    firsts = [
        next(n for n, w in enumerate(task.windows["dev"]) if w.question == k) for k in (0, 1, 2)
    ]
    assert list(null.values()) == [2 * (10 + k * 100 + n) for k, n in enumerate(firsts)]


def test_bad_questions_are_counted_and_named(tmp_path) -> None:
    good = qa(1, "who sat", "a king")
    wrong = qa(2, "who sat", "a king")
    wrong["answers"][0]["answer_start"] += 1
    path = tmp_path / "bad.json"
    file(path, [[good, wrong, good, qa(4, " ", "Rome"), qa(5, "who")]])
    questions, problems = read(path, labelled=True)
    assert [q.id for q in questions] == ["q1"]
    assert dict(problems.where) == {
        "answer not in the context": ["q2"],
        "duplicate id": ["q1"],
        "question is empty": ["q4"],
        "no answer": ["q5"],
    }
    backwards = qa(1, "who sat", "a king")
    backwards["answers"][0]["answer_start"] -= len(CONTEXT)
    _, problems = read(Path(file(tmp_path / "back.json", [[backwards]])), labelled=True)
    assert dict(problems.kinds) == {"answer not in the context": 1}
    of_no_list = ('{"data": {}}', '{"data": [{"paragraphs": {}}]}')
    for text in (*of_no_list, "[]", '{"data": ["a"]}', "no json", "[" * 10**5):
        path.write_text(text)
        with pytest.raises(UserError, match="bad.json: not in SQuAD's format"):
            read(path, labelled=True)


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"id": 2}, "id is not text"),
        ({"question": None}, "question is not text"),
        ({"question": "a \ud800 b"}, "question holds NUL or a lone surrogate"),
        ({"question": "a\0b"}, "question holds NUL or a lone surrogate"),
        ({"is_impossible": True}, "is_impossible, yet has an answer"),
        ({"is_impossible": "false"}, "is_impossible is not true or false"),
        ({"is_impossible": False, "answers": []}, "no answer"),
        ({"answers": None}, "answers are not a list of objects"),
        (
            {"answers": [{"text": "Rome", "answer_start": "5"}]},
            "text or answer_start of an answer has the wrong type",
        ),
    ],
)
def test_a_bad_value_costs_its_question_alone(changes, kind, tmp_path) -> None:
    path = Path(file(tmp_path / "x.json", [[qa(1, "who", "Rome"), qa(2, "who", "Rome") | changes]]))
    questions, problems = read(path, labelled=True)
    place = "data[0].paragraphs[0].qas[1]" if "id" in changes else "q2"
    assert [q.id for q in questions] == ["q1"] and problems.total == 2
    assert dict(problems.where) == {kind: [place]}
    if changes.keys() & {"id", "question"}:
        with pytest.raises(UserError, match=f"{kind} .*; a test file must be whole") as caught:
            read(path, labelled=False)[1].check_whole()
        assert place in str(caught.value)
    else:
        assert len(read(path, labelled=False)[0]) == 2


def test_a_bad_context_costs_its_questions(tmp_path) -> None:
    for context in (None, " ", "Rome \ud800"):
        path = tmp_path / "x.json"
        file(path, [[qa(1, "who", "Rome")]])
        plain = json.loads(path.read_text())
        plain["data"][0]["paragraphs"][0]["context"] = context
        path.write_text(json.dumps(plain))
        _, problems = read(path, labelled=True)
        assert list(problems.where.values()) == [["q1"]] and "context" in next(problems.lines())


@pytest.mark.parametrize("other", [qa(1, "where"), qa(2, " ")])
def test_a_test_file_must_be_whole(other, tmp_path) -> None:
    path = file(
        tmp_path / "test.json", [[qa(1, "who"), *[qa(n, "who") for n in range(3, 300)], other]]
    )
    with pytest.raises(UserError, match=rf"test.json: .*{other['id']}\).*must be whole"):
        squad(tmp_path, test_file=path)


@pytest.mark.parametrize("listed", [True, False])
def test_one_question_a_line_is_the_same(listed, tmp_path) -> None:
    nested = [[qa(1, "who sat", "a king", "king")], [qa(2, "where", impossible=True)]]
    wanted, _ = read(Path(file(tmp_path / "x.json", nested)), labelled=True)
    rows = []
    for n, (question,) in enumerate(nested):
        answers = question["answers"]
        if not listed:
            answers = {key: [a[key] for a in answers] for key in ("text", "answer_start")}
        flat = {"id": question["id"], "question": question["question"], "title": str(n)}
        rows.append(flat | {"context": CONTEXT, "answers": answers})
    path = tmp_path / "x.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read(path, labelled=True)[0] == wanted
    without = [{key: row[key] for key in ("question", "context")} for row in rows]
    path.write_text("".join(json.dumps(row) + "\n" for row in without))
    assert [q.id for q in read(path, labelled=False)[0]] == ["0", "1"]


@pytest.mark.parametrize(
    ("before", "again", "message"),
    [
        ('"question": ', '"question": "of whom", ', "'question' .* of 'q1'"),
        ('"answers": ', '"answers": [], ', "'answers' .* of 'q1'"),
        ('"answer_start": ', '"answer_start": 0, ', "'answer_start' .* of 'a king'"),
        ('"qas": ', '"qas": [], ', "'qas' .* of 'Paris"),
        ('"data": ', '"data": [], ', "'data' .* of '2.0'"),
    ],
)
def test_a_field_that_stands_twice_is_named_and_its_object(before, again, message, tmp_path):
    path = Path(file(tmp_path / "x.json", [[qa(1, "who sat", "a king")]]))
    path.write_text(path.read_text().replace(before, again + before))
    with pytest.raises(UserError, match=f"x.json: field {message}"):
        read(path, labelled=True)
    flat = {"id": "1", "question": "who", "context": CONTEXT, "answers": []}
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(flat) + "\n" + json.dumps(flat)[:-1] + ', "question": "whom"}\n')
    assert dict(read(path, labelled=True)[1].where) == {"a field twice in an object": ["2"]}


def test_bad_lines_of_questions_are_named(tmp_path) -> None:
    good = {"id": 1, "question": "who", "context": CONTEXT, "answers": []}
    wrong = [{"answers": {"text": ["a"]}}, {"answers": "a"}, {"context": [1]}, {"question": " "}]
    wrong += [{"answers": [{"text": "Rome", "answer_start": 0}]}]
    wrong += [{"answers": [{"text": "a king", "answer_start": 1}], "is_impossible": True}]
    path = tmp_path / "x.jsonl"
    lines = [json.dumps(good), *(json.dumps(good | {"id": n} | w) for n, w in enumerate(wrong, 2))]
    path.write_text("\n".join([*lines, "{"]))
    found, problems = read(path, labelled=True)
    assert [q.id for q in found] == ["1"] and problems.total == 8
    assert dict(problems.where) == {
        "answers are not lists of text and answer_start, equally long": ["2"],
        "answers are not a list of objects": ["3"],
        "title or context is not text": ["4"],
        "question is empty": ["5"],
        "answer not in the context": ["6"],
        "is_impossible, yet has an answer": ["7"],
        "not JSON": ["8"],
    }
    path.write_text('{"question": "a", "context": "b"}\n')
    with pytest.raises(UserError, match="no column answers; it has question, context"):
        read(path, labelled=True)


def test_the_version_may_be_a_number() -> None:
    given = {"1.1": "1.1", "2.0": "2.0", '"1.1"': "1.1"}
    for text, version in given.items():
        config = load(CONFIG, FinetuneConfig, [f"squad.version={text}"])
        assert config.squad.version == version
    with pytest.raises(UserError, match=r"squad.version: .* given '1.5'"):
        load(CONFIG, FinetuneConfig, ["squad.version=1.5"])


def test_the_header_s_settings_for_1_1_are_the_paper_s() -> None:
    (line,) = [x for x in CONFIG.read_text().split("\n") if x.startswith("#   --set ")]
    config = load(CONFIG, FinetuneConfig, line.split()[2:])
    assert config.squad.version == "1.1" and config.run_dir == "runs/squad1"
    grid = config.grid
    assert (grid.batch_size, grid.epochs, grid.learning_rate) == ((32,), (3,), (5e-5,))


def test_a_2_0_file_is_refused_as_1_1(tmp_path) -> None:
    path = file(tmp_path / "two.json", [[qa(1, "who", impossible=True), qa(2, "who", "Rome")]])
    config = SquadConfig(version="1.1", train_file=path, dev_file=path)
    with pytest.raises(UserError, match="1 questions have no answer; squad.version is 1.1"):
        Squad("SQuAD", config, TrainConfig(), tiny.tokenizer())


def test_no_article_is_in_both_parts(tmp_path) -> None:
    articles = [[qa(f"{n}-{k}", "who", "Rome") for k in range(3)] for n in range(7)]
    questions, _ = read(
        tmp_path / "x.json" if file(tmp_path / "x.json", articles) else None, labelled=True
    )
    train, dev = split_by_article(questions, 0.3)
    assert len(train) + len(dev) == 21 and len(dev) == 6
    assert not {q.article for q in train} & {q.article for q in dev}
    with pytest.raises(UserError, match="dev_share"):
        split_by_article(questions[:3], 0.3)


def test_a_stride_that_skips_text_is_refused() -> None:
    with pytest.raises(ValueError, match="between windows would be lost"):
        SquadConfig(train_file="x", dev_file="x", max_seq_len=128, stride=100)


def test_a_long_id_is_named_in_short(tmp_path) -> None:
    path = Path(file(tmp_path / "x.json", [[qa(1, "who", "Rome") | {"id": "q" * 10**6}] * 2]))
    with pytest.raises(UserError, match="duplicate id .question qqq") as error:
        read(path, labelled=True)[1].check(0)
    assert len(str(error.value)) < 1000
