"""A run that starts from a folder has the folder's shape, and says so before anything is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from configs.load import dump
from core.errors import UserError
from pretrain.config import PretrainConfig, load_run
from pretrain.model_config import SHARED_KEYS, ModelConfig
from pretrain.origin import shape_of
from pretrain.plan import main as plan_main
from pretrain.pretrained import initial_weights
from tests.datasets import write_dataset
from tests.pretrain.test_hugging_face import PIECES, Tokenizer, run_model

THERE = {
    "vocab_size": 101,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 600,
    "type_vocab_size": 2,
    "hidden_dropout_prob": 0.2,
    "attention_probs_dropout_prob": 0.3,
    "layer_norm_eps": 1e-7,
    "initializer_range": 0.05,
}
RUN = """
run_dir: {run}
init_from: {folder}
data: {{dir: data/none, next_sentence: none}}
phases: [{{max_seq_len: 520, steps: 5, micro_batch_rows: 2}}]
model: {{compile: true}}
"""


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """Written by Hugging Face's library, with other heads, positions and epsilon than BERT-BASE."""
    torch.manual_seed(0)
    peer = transformers.BertForPreTraining(transformers.BertConfig(**THERE))
    peer.save_pretrained(tmp_path / "bert")
    (tmp_path / "bert/vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    return tmp_path / "bert"


@pytest.fixture
def run(bert: Path, tmp_path: Path) -> Path:
    file = tmp_path / "run.yaml"
    file.write_text(RUN.format(run=tmp_path / "run", folder=bert))
    return file


def checkpoint(folder: Path, model: ModelConfig) -> None:
    folder.mkdir(parents=True)
    plain = {"config": {"model": model.model_dump(mode="json")}}
    (folder / "state.json").write_text(json.dumps(plain))


def test_the_shape_comes_from_the_folder_and_what_is_asked_for_stays(
    bert: Path, run: Path, tmp_path: Path
) -> None:
    config = load_run(run, ["model.hidden_dropout_prob=0"])
    expected = THERE | {"vocab_size": 0, "is_decoder": False, "hidden_dropout_prob": 0.0}
    assert {key: getattr(config.model, key) for key in SHARED_KEYS} == expected
    assert config.model.compile  # the rest is the run's own
    again = tmp_path / "again.yaml"
    again.write_text(dump(config))
    assert load_run(again) == config
    assert shape_of(str(bert)).model_dump(include=set(THERE)) == THERE
    model = run_model(**config.model.model_dump(exclude={"vocab_size", "vocab_multiple"}))
    initial_weights(str(bert), model, Tokenizer(PIECES, True))


def test_a_run_of_ours_gives_its_newest_shape_and_a_resume_needs_no_folder(
    bert: Path, run: Path, tmp_path: Path
) -> None:
    ours, other = (ModelConfig(hidden_size=64, num_attention_heads=n) for n in (4, 2))
    checkpoint(tmp_path / "ours/checkpoints/step-00000005", ours)
    checkpoint(tmp_path / "ours/checkpoints/step-00000040", other)
    sets = [f"init_from={tmp_path / 'ours'}", "phases.0.max_seq_len=128"]
    assert load_run(run, sets).model.num_attention_heads == 2
    older = [f"init_from={tmp_path / 'ours/checkpoints/step-00000005'}", *sets[1:]]
    assert load_run(run, older).model.num_attention_heads == 4
    # One that is damaged is passed over, as the weights of it are.
    (tmp_path / "ours/checkpoints/step-00000041").mkdir()
    (tmp_path / "ours/checkpoints/step-00000041/state.json").write_text("{")
    assert load_run(run, sets).model.num_attention_heads == 2
    damaged = f"init_from={tmp_path / 'ours/checkpoints/step-00000041'}"
    with pytest.raises(UserError, match=r"init_from: .*state.json: not JSON"):
        load_run(run, [damaged])
    before = load_run(run)
    checkpoint(tmp_path / "run/checkpoints/step-00000001", before.model)
    bert.rename(tmp_path / "gone")
    assert load_run(run) == before
    newer = tmp_path / "run/checkpoints/step-00000002"
    newer.mkdir()
    (newer / "state.json").write_text('{"config": ')
    assert load_run(run) == before
    # Without any that is whole the start says so, and not the shape.
    (newer.with_name("step-00000001") / "state.json").write_text("{}")
    (tmp_path / "gone").rename(bert)
    assert load_run(run, ["phases.0.max_seq_len=128"]).model == ModelConfig(compile=True)


@pytest.mark.parametrize(
    ("sets", "parts"),
    [
        (["model.num_attention_heads=4"], ["has num_attention_heads 8", "says 4", "heads: 8"]),
        (["model.hidden_size=33"], ["has hidden_size 32", "says 33", "model.hidden_size: 32"]),
        (["model.layer_norm_eps=1e-12"], ["layer_norm_eps 1e-07", "says 1e-12"]),
        (["objective=left_to_right"], ["is_decoder False", "objective: masked"]),
        (["model.num_attention_heads=many"], ["model.num_attention_heads", "given many"]),
        (["model=3"], ["model", "given 3"]),
        (["init_from=bert-base-uncased"], ["init_from: bert-base-uncased", "import hf:"]),
        (["init_from=/proc"], ["init_from: /proc", "neither a config.json nor a checkpoint"]),
        (["init_from=3"], ["init_from", "string"]),
        ([f"init_from={'x' * 300}"], ["init_from: ", "File name too long"]),
        ([f"run_dir={'x' * 300}"], ["run_dir: ", "File name too long"]),
        ([f"model.hidden_size={'9' * 400}"], ["model.hidden_size"]),
    ],
)
def test_what_the_folder_contradicts_is_one_line(
    run: Path, sets: list[str], parts: list[str]
) -> None:
    with pytest.raises(UserError) as caught:
        load_run(run, sets)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)


def test_plan_refuses_another_vocabulary_in_the_words_of_training(
    bert: Path, run: Path, tmp_path: Path
) -> None:
    swapped = [*PIECES[:70], PIECES[71], PIECES[70], *PIECES[72:]]
    documents = [[list(range(5, 40))] * 9] * 9
    write_dataset(tmp_path / "data", documents, heldout=documents, vocab=swapped)
    sets = [f"data.dir={tmp_path / 'data'}", "phases.0.rows_per_step=1"]
    config = load_run(run, sets)
    model = run_model(**config.model.model_dump(exclude={"vocab_size", "vocab_multiple"}))
    with pytest.raises(UserError, match="piece 70") as trained:
        initial_weights(str(bert), model, Tokenizer(swapped, True))
    plan = ["--config", str(run), "--gpus", "1", "--json", "--set", *sets]
    with pytest.raises(UserError) as planned:
        plan_main(plan)
    assert str(planned.value) == str(trained.value)
    assert plan_main([*plan, "data.accept_changed=[vocab_sha256]"]) == 0
    write_dataset(tmp_path / "data", documents, heldout=documents, vocab=PIECES)
    assert plan_main(plan) == 0
    ours = tmp_path / "ours"  # a run gives its own casing
    checkpoint(ours, config.model)
    (ours / "vocab.txt").write_text((bert / "vocab.txt").read_text())
    with pytest.raises(UserError, match=f"{ours} was trained with lowercase: false"):
        plan_main([*plan, f"init_from={ours}"])
    (ours / "vocab.txt").rename(bert / "kept.txt")
    (bert / "vocab.txt").unlink()
    with pytest.raises(UserError, match="has no vocab.txt or tokenizer.json"):
        plan_main(plan)
    checkpoint(tmp_path / "run/checkpoints/step-00000001", config.model)
    assert plan_main(plan) == 0  # it goes on from its own


def test_without_a_folder_nothing_is_filled_in(run: Path) -> None:
    config = load_run(run, ["init_from=null", "phases.0.max_seq_len=128"])
    assert config.model == ModelConfig(compile=True) and isinstance(config, PretrainConfig)
