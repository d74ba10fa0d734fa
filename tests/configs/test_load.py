"""The configuration tree: what is accepted is exactly what was meant, what is not is explained."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Literal

import pytest
from pydantic import Field, ValidationError

from configs.load import Config, LocalPath, check, describe, differences, dump, load, override
from core.errors import UserError, main_guard
from data_pipeline.corpus.settings import PrepareConfig
from data_pipeline.stream.plan import StreamConfig
from finetune.config import FinetuneConfig
from pretrain.config import PretrainConfig
from pretrain.engine_config import EngineConfig


class Inner(Config):
    steps: int = Field(10, ge=1, description="optimiser steps")
    rate: float = Field(1e-4, description="peak rate")


class Tree(Config):
    name: str = Field(description="name of the run")
    inner: Inner = Field(default_factory=Inner, description="one section")
    many: tuple[Inner, ...] = Field((), description="several sections")
    rates: tuple[float, ...] = Field((), description="several numbers")
    kind: Literal["a", "b"] = Field("a", description="a or b")
    on: bool = Field(True, description="a switch")
    maybe: int | None = Field(None, description="a number or nothing")


class Run(Config):
    run_dir: LocalPath


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text("name: x\ninner: {rate: 1e-3}\nmany:\n  - {steps: 5}\n  - {steps: 6}\n")
    return path


def message(path: Path | None, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(path, Tree, overrides)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_defaults_then_file_then_overrides_in_order(file: Path) -> None:
    tree = load(file, Tree, ["many.1.steps=8", "inner.steps=3", "inner.steps=4"])
    assert (tree.inner.steps, tree.inner.rate) == (4, 1e-3)
    assert [m.steps for m in tree.many] == [5, 8]
    assert tree.kind == "a"


def test_numbers_that_yaml_reads_as_text_are_converted_by_type(file: Path) -> None:
    # PyYAML reads 1e-3 without a dot as text.
    assert load(file, Tree, ["inner.rate=2e-4"]).inner.rate == 2e-4


def test_what_is_printed_loads_to_the_same_tree(file: Path, tmp_path: Path) -> None:
    tree = load(file, Tree, ["maybe=3", "on=false"])
    again = tmp_path / "again.yaml"
    again.write_text(dump(tree))
    assert load(again, Tree) == tree


def test_a_file_that_extends_another_says_only_what_differs(file: Path, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    middle, top = tmp_path / "sub/middle.yaml", tmp_path / "top.yaml"
    middle.write_text("extends: ../run.yaml\ninner: {steps: 7}\nmany: {1: {rate: 0.5}}\n")
    top.write_text("extends: sub/middle.yaml\nname: y\nmaybe: 3\n")
    whole = tmp_path / "whole.yaml"
    whole.write_text(
        "name: y\nmaybe: 3\ninner: {rate: 1e-3, steps: 7}\n"
        "many:\n  - {steps: 5}\n  - {steps: 6, rate: 0.5}\n"
    )
    sets = ["many.0.steps=8"]
    assert load(top, Tree, sets) == load(whole, Tree, sets) != load(whole, Tree)
    assert "extends" not in dump(load(top, Tree))
    top.write_text("extends: run.yaml\nmany: [{steps: 1}]\n")  # a list stands for the whole
    assert [x.steps for x in load(top, Tree).many] == [1]


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("extends: top.yaml", "in a circle"),
        ("extends: circle.yaml", "in a circle"),
        ("extends: none.yaml", "none.yaml"),
        ("extends: [run.yaml]", "a file is expected, given [run.yaml]"),
        ("extends: run.yaml\nmany: {2: {steps: 1}}", "many.2: not a position"),
        ("extends: run.yaml\nmany: {a: {steps: 1}}", "many.a: not a position"),
        ("extends: run.yaml\ninner: {stepz: 1}", "did you mean inner.steps?"),
        ("extends: broken.yaml", "broken.yaml: not valid YAML"),
    ],
)
def test_what_cannot_be_extended_is_one_line(
    file: Path, tmp_path: Path, text: str, part: str
) -> None:
    (tmp_path / "circle.yaml").write_text("extends: top.yaml\n")
    (tmp_path / "broken.yaml").write_text("a: [\n")
    (tmp_path / "top.yaml").write_text(text + "\n")
    said = message(tmp_path / "top.yaml")
    assert part in said and str(tmp_path) in said


def test_a_list_whose_items_hold_what_is_wrong_is_not_too_short() -> None:
    class One(Tree):
        many: tuple[Inner, ...] = Field(min_length=1, description="at least one")

    with pytest.raises(UserError) as caught:
        check({"name": "x", "many": [{"steps": 0}]}, One, "file")
    assert str(caught.value) == (
        "file: many.0.steps: input should be greater than or equal to 1, given 0"
    )
    with pytest.raises(UserError, match="many: tuple should have at least 1 item"):
        check({"name": "x", "many": []}, One, "file")


def test_the_tree_is_frozen(file: Path) -> None:
    with pytest.raises(ValidationError):
        load(file, Tree).name = "y"


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("inner.stpes=5", ["inner.stpes", "unknown key", "did you mean inner.steps?"]),
        ("steps=5", ["steps", "did you mean inner.steps?"]),
        ("many.0.stepz=5", ["many.0.stepz", "did you mean many.0.steps?"]),
        ("zzzzz=5", ["zzzzz", "allowed here: name, inner"]),
        ("inner.steps=0", ["inner.steps", "greater than or equal to 1", "given 0"]),
        ("inner.steps=many", ["inner.steps", "valid integer", "given many"]),
        ("inner.steps=1.5", ["inner.steps", "integer", "given 1.5"]),
        ("inner.steps=true", ["inner.steps", "a number is expected", "true"]),
        ("on=1", ["on", "true or false", "1"]),
        ("kind=c", ["kind", "'a' or 'b'", "given c"]),
        ("many.2.steps=1", ["many.2.steps=1", "0 to 1"]),
        ("many.².steps=1", ["many.².steps=1", "0 to 1"]),
        (f"many.{'9' * 5000}.steps=1", ["999.steps=1", "0 to 1"]),
        ("many.0.rate=1e500", ["many.0.rate", "finite", "given 1e500"]),
        ("many.0.rate=-1e19", ["many.0.rate", "a number below 2^63 is expected"]),
        ("maybe=9223372036854775808", ["maybe", "a number below 2^63 is expected"]),
        ("rates=[1, 1e30]", ["rates", "a number below 2^63 is expected"]),
        ("name.deeper=1", ["name.deeper=1", "not a section"]),
        ("name", ["expected key=value"]),
        ("a." * 300 + "b=1", ["--set a.a.", "nested over 50 deep"]),
    ],
)
def test_errors_name_key_value_and_what_is_allowed(
    file: Path, override: str, parts: list[str]
) -> None:
    text = message(file, override)
    for part in parts:
        assert part in text
    if "=" in override and "--set" not in text:
        assert str(file) in text


@pytest.mark.parametrize(
    ("content", "part"),
    [
        ("inner: {}\n", "name: required key is missing"),
        ("name: [1\n", "not valid YAML"),
        ("- 1\n", "expected `key: value`"),
        ("[]\n", "expected `key: value`"),
        ("? [a, b]\n: 3\n", "[a, b] is no key"),
        ("name: x\nname: y\n", "appears twice"),
        ("name: x\ninner: 3\n", "inner"),
    ],
)
def test_broken_files_are_explained(tmp_path: Path, content: str, part: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    text = message(path)
    assert part in text and str(path) in text


@pytest.mark.parametrize(
    ("text", "number"),
    [("010", 10), ("0042", 42), ("08", 8), ("0x1F", 31), ("1_000", 1000), ("-7", -7), ("0", 0)],
)
def test_numbers_are_decimal_with_or_without_zeros_before_them(
    tmp_path: Path, text: str, number: int
) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"name: x\nmaybe: {text}\n")
    assert load(path, Tree).maybe == number
    assert load(None, Tree, ["name=x", f"maybe={text}"]).maybe == number


def test_a_time_of_day_is_no_number() -> None:
    assert ": maybe: " in message(None, "name=x", "maybe=1:30")
    assert ": inner.rate: " in message(None, "name=x", "inner.rate=1:30.5")


BOMB = "a0: &a0 [x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join(9 * [f'*a{i - 1}'])}]\n" for i in range(1, 10)
)


@pytest.mark.parametrize(
    "value",
    ["2024-99-99", "0b_", "0x_", "!!int abc", "!!float abc", "!!timestamp x", "!!binary é",
     "!!bool maybe", "!!omap [1]", "!!set [1]", "!unknown 1", "&a [*a]", "9" * 5000,
     "0x" + "f" * 5000, "{a: [0b1" + 20000 * "0" + "]}", "1" + 3000 * ":0",
     "1:99:99", "[" * 1000, "{" * 1000, "? {a: b}", "? !!set {a}", "1e999", ".inf", "<<: [1, 2]",
     "!!python/object/apply:os.system [true]"],
)  # fmt: skip
def test_what_yaml_cannot_make_is_one_line(tmp_path: Path, value: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"name: x\nmaybe: {value}\n", encoding="utf-8")
    assert message(path).startswith(f"{path}: ")
    assert message(None, "name=x", f"maybe={value}").startswith("defaults: maybe: ")


@pytest.mark.parametrize("value", [r'"a\0b"', r'"a\ud800b"'])
def test_a_text_that_can_name_no_file_is_one_line(tmp_path: Path, value: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"name: {value}\n", encoding="utf-8")
    assert message(path).startswith(f"{path}: name: a character that no file's name can have")
    assert message(None, f"name={value}").startswith("defaults: name: a character that")


@pytest.mark.parametrize("value", [r'"a\0b"', r'{"a\ud800b": 1}', r'[[{"a": ["\0"]}]]'])
def test_a_text_within_a_section_of_anything_is_looked_at_too(value: str) -> None:
    with pytest.raises(UserError, match="deepspeed: a character that no file's name can have"):
        load(None, EngineConfig, [f"deepspeed.key={value}"])


def test_json_that_writes_a_character_as_two_escapes_is_read(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"name": "a\U0001f600\U0001f601 \u00e9"}))
    assert load(path, Tree).name == "a\U0001f600\U0001f601 \u00e9"
    assert load(None, Tree, [r'name="\ud83d\ude00"']).name == "\U0001f600"


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("s3://bucket/run", "s3://bucket/run: a path on this machine is expected"),
        ("pipe:cat x", "pipe:cat x: a path on this machine is expected"),
        ("~no-such-user/run", "~no-such-user/run: no such user's home"),
        ("", "not an empty text"),
        ("a/" * 1500, "a path of over 250 folders"),
    ],
)
@pytest.mark.parametrize(
    ("model", "key"),
    [(PretrainConfig, "run_dir"), (PrepareConfig, "out"), (FinetuneConfig, "run_dir"),
     (PretrainConfig, "init_from"), (PretrainConfig, "data.cache_dir")],
)  # fmt: skip
def test_what_is_written_is_on_this_machine(
    model: type[Config], key: str, path: str, part: str
) -> None:
    with pytest.raises(UserError, match=f"defaults: .*{key}: [^;]*{re.escape(part)}"):
        load(None, model, [override(key, path)])


def test_a_home_is_found_as_a_shell_finds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    data = check({"dir": "~/sets", "cache_dir": "~/cache"}, StreamConfig, "here")
    assert (data.dir, data.cache_dir) == ("/home/me/sets", "/home/me/cache")
    assert check({"run_dir": "file:///runs/x%20y"}, Run, "here").run_dir == "/runs/x y"
    assert StreamConfig(dir="s3://bucket/~/sets").dir == "s3://bucket/~/sets"


def test_a_text_that_looks_like_a_broken_date_stays_a_text(file: Path) -> None:
    assert load(file, Tree, ["name=2024-99-99"]).name == "2024-99-99"


@pytest.mark.parametrize(
    "text",
    [
        BOMB, BOMB.replace(": &", ": !!set &"), "b: &b {b: *b}\n", "m: &m {<<: [*m, *m]}\n",
        "name: " + "{a: " * 60 + "1" + "}" * 60, "name: " + "[" * 300 + "]" * 300,
        "a0: &a0 1\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 300)),
    ],
)  # fmt: skip
def test_aliases_that_explode_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    assert "not valid YAML" in message(path)


def test_aliases_of_a_sane_size_are_taken(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: x\ninner: &i {steps: 7}\nmany: [*i, *i]\n")
    tree = load(path, Tree)
    assert [m.steps for m in tree.many] == [7, 7]


def test_missing_and_binary_files(tmp_path: Path) -> None:
    assert "No such file" in message(tmp_path / "none.yaml")
    binary = tmp_path / "b.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    assert "UTF-8" in message(binary)


@pytest.mark.parametrize(
    "name",
    ["runs/a", "2024-01-01", "a #1", "~", "on", "x\ny: [", "\udcff\x1b", "a " * 300 + "b"],
)
def test_a_text_is_handed_on_as_it_is(name: str) -> None:
    assert load(None, Tree, [override("name", name)]).name == name
    assert override("name", "runs/a") == "name=runs/a"


def test_a_value_of_set_has_no_comments() -> None:
    """The folder `runs/a #2` is not `runs/a`."""
    for name in ("runs/a #2", "#2", "it's #2", "a [b] #2", 'a "b" #2'):
        assert load(None, Tree, [f"name={name}"]).name == name
    assert load(None, Tree, ["name='a #2' # x"]).name == "a #2"
    assert load(None, Tree, ["name=x", "many=[{steps: '5' # five\n}]"]).many[0].steps == 5


@pytest.mark.parametrize(
    "name", ["runs/a\nb", "a\n\nb", "\na", "a\rb", "a\x85b", "a\u2028b", "a\n"]
)
def test_a_value_of_set_keeps_the_ends_of_its_lines(file: Path, name: str) -> None:
    """The folder `a\\nb` is not `a b`, nor where the tree that is printed is read again."""
    tree = load(None, Tree, [f"name={name}"])
    assert tree.name == name
    file.write_text(dump(tree), encoding="utf-8")
    assert load(file, Tree) == tree
    assert load(None, Tree, ["name=x", "inner=steps: 3\nrate: 1"]).inner == Inner(steps=3, rate=1)
    assert load(None, Tree, ["name=|\n a\n b\n"]).name == "a\nb\n"


def test_what_is_no_config_file_is_one_line(tmp_path: Path) -> None:
    path, other = tmp_path / "run.yaml", tmp_path / "other.yaml"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "huge").write_bytes(b"#" * 2_000_000)
    for number in range(60):
        (tmp_path / f"{number}.yaml").write_text(f"extends: {number + 1}.yaml\n")
    for place, part in (
        ("pipe", "not a regular file"),
        ("/dev/zero", "not a regular file"),
        ("loop", "Too many levels"),
        ("huge", "is it a config"),
        ("0.yaml", "files extend each other"),
        ("x" * 300, "too long"),
        ("http://host/x.yaml", "No such file"),
        (".", "Is a directory|not a regular file"),
    ):
        path.write_text(f"extends: {place}\nname: x\n")
        assert re.search(part, message(path)), place
        assert re.search(part, message(tmp_path / place)), place
    other.write_text('extends: "a\\0b"\n')
    assert "null byte" in message(other)


def test_help_lists_every_key_with_type_default_and_doc() -> None:
    text = describe(Tree)
    for part in (
        "inner.steps  (whole number, default 10)",
        "many.N.rate",
        "optimiser steps",
        "name  (text, required)",
        "a | b, default a",
        "true | false, default true",
    ):
        assert part in text


def test_a_user_mistake_is_one_line_and_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise UserError("x.yaml: steps: too few")

    assert main_guard(fail) == 2
    assert capsys.readouterr().err == "error: x.yaml: steps: too few\n"
    assert main_guard(lambda: 3) == 3

    def quote() -> int:
        raise UserError("x.yaml: " + "steps" * 100_000)  # a hostile file may be one long line

    assert main_guard(quote) == 2 and len(capsys.readouterr().err) < 5000


@pytest.mark.parametrize(
    "override",
    [
        "watchdog_seconds=1e10",  # more than a clock of the system takes
        "watchdog_seconds=1e-300",
        "threads=100000",
        "data.workers=2000",
        "data.fetch_timeout=1e12",
        "data.fetch_retries=1100",
        "data.worker_timeout=1e12",
        "phases.0.max_predictions=99999999999",
        "phases.0.max_sequences_per_row=99999999999",
        "phases.0.rows_per_step=1000000000",  # a step of days, before which nothing is said
        "phases.0.rows_multiple=1000000000",
        "phases.0.sequences_per_step=1000000000",
        "data.prefetch_batches=4611686018427387904",
    ],
)
def test_a_number_that_no_machine_takes_is_one_line(override: str) -> None:
    demo = Path(__file__).parents[2] / "configs/pretrain_demo.yaml"
    key = override.partition("=")[0]
    with pytest.raises(UserError, match=key) as caught:
        load(demo, PretrainConfig, [override])
    assert "\n" not in str(caught.value)


def test_a_list_of_one_wrong_item_is_one_mistake() -> None:
    class Listed(Config):
        names: tuple[Literal["a", "b"], ...] = Field(("a",), min_length=1, description="names")

    for given, clauses in (("[c]", 1), ("[]", 1), ("[c, d]", 2)):
        with pytest.raises(UserError) as caught:
            load(None, Listed, [f"names={given}"])
        assert str(caught.value).count("given") == clauses


def test_differences_name_the_leaves_that_differ() -> None:
    old = {"a": 1, "b": {"c": [1, {"d": 2}], "gone": 0}, "e": [1, 2], "same": {"x": None}}
    new = {"a": 1, "b": {"c": (1, {"d": 3}), "new": 4}, "e": [1], "same": {}}
    assert differences(old, new) == {
        "b.c.1.d": [2, 3],
        "b.gone": [0, None],
        "b.new": [None, 4],
        "e": [[1, 2], [1]],
    }
    assert differences(old, old) == {}


def test_what_is_wrong_may_be_megabytes_and_its_beginning_is_shown() -> None:
    long = "x" * 10**7
    for value in (long, {"a": {"b": [long]}}, [[1] * 10**6], dict.fromkeys(range(10**6))):
        with pytest.raises(UserError, match="rate: .* given [x{[]") as caught:
            check({"inner": {"rate": value}}, Tree, "x.yaml")
        assert len(str(caught.value)) < 500
    for strange in (dict.fromkeys(map(str, range(10**4))), {"x" * 10**7: 1}):
        with pytest.raises(UserError, match="unknown key") as caught:
            check(strange, Tree, "x.yaml")
        assert len(str(caught.value)) < 5000
