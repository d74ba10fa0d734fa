"""Loading is strict: what is new is said, what does not fit stops."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import pretrain.pretrained
from core.errors import TryAgain, UserError
from data_pipeline.corpus.tokenizer import Tokenizer
from finetune import loading
from finetune.config import EncoderConfig
from finetune.examples import Item, sequence
from finetune.heads import HeadSpec
from finetune.train import seed_dropout
from pretrain.model import BertForPreTraining
from tests.finetune import tiny

TWO = HeadSpec("sequence", 2, ("no", "yes"))
WORD_PIECES = {"type": "WordPiece", "continuing_subword_prefix": "##"}
IDS = {piece: number for number, piece in enumerate(tiny.PIECES)}


NORMALIZER = {"normalizer": {"type": "BertNormalizer", "lowercase": 1}}


def vocab(ids) -> dict:
    return {"model": WORD_PIECES | {"vocab": ids}}


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
    return tiny.encoder(tmp_path_factory.mktemp("encoder") / "export")


@pytest.fixture
def folder(pretrained, tmp_path):
    return shutil.copytree(pretrained, tmp_path / "copy")


def load(folder, head=TWO, seed=0, **changes):
    config = EncoderConfig(path=str(folder), **changes)
    return loading.build(loading.read(config, 32), head, config, seed)


def edit_weights(folder, change) -> None:
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")


def test_a_new_head_and_what_is_left_behind_are_said(pretrained) -> None:
    model, notes = load(pretrained)
    assert notes[0] == "new layer: classifier (2 outputs)"
    assert notes[1] == "left behind: cls.predictions, cls.seq_relationship"
    stored = load_file(pretrained / "model.safetensors")
    for name, tensor in model.state_dict().items():
        if name.startswith("bert."):
            assert torch.equal(tensor, stored[name]), name
    assert model.classifier.weight.std() > 0 and model.classifier.bias.abs().sum() == 0


@pytest.mark.parametrize(("said", "asked"), [(0.0, 0.3), (0.3, 0.0), (0.3, None)])
def test_the_dropout_asked_for_is_that_of_a_folder_that_says_it(tmp_path, said, asked) -> None:
    """Asked for or said by the folder: the same outputs, and others than without or with it."""
    wanted = said if asked is None else asked
    outputs = {}
    for name, of_folder, key in (
        ("asked", said, asked), ("said", wanted, None), ("other", 0.3 - wanted, None)
    ):  # fmt: skip
        chances = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), of_folder)
        encoder = tiny.encoder(tmp_path / name, **chances)
        model = load(encoder, dropout=key)[0].train()
        seed_dropout(5, 1)
        outputs[name] = model(model.collate([item([2, 7, 8, 9, 3])], torch.device("cpu")))
    assert torch.equal(outputs["asked"], outputs["said"])
    assert not torch.equal(outputs["asked"], outputs["other"])


@pytest.mark.parametrize("kind", ["tokens", "sequence"])
def test_a_left_to_right_encoder_keeps_its_mask(tmp_path, kind) -> None:
    folder = tiny.encoder(tmp_path / "export", is_decoder=True)
    model = load(folder, HeadSpec(kind, 2, ("no", "yes")))[0].eval()
    ids = [tiny.tokenizer().cls_id, *range(7, 15), tiny.tokenizer().sep_id]
    outputs = []
    for other in (7, 20):
        ids[5] = other
        batch = model.collate([item(ids), item([0, 8, 0])], torch.device("cpu"))
        outputs.append(model(batch))
    same = (outputs[0] == outputs[1]).all(1).tolist()
    # What stands before the token that changed has not seen it; a sequence's class has.
    assert same == ([True] * 5 + [False] * 5 + [True] * 3 if kind == "tokens" else [False, True])
    model.save(tmp_path / "saved")
    again = load(tmp_path / "saved", HeadSpec(kind, 2, ("no", "yes")))[0].eval()
    assert torch.equal(again(batch), outputs[1])


def item(ids: list[int]) -> Item:
    return Item((sequence(tiny.tokenizer(), ids[1:-1]),), None)


def test_new_layers_depend_on_the_seed_alone(pretrained) -> None:
    a, b, c = (load(pretrained, seed=s)[0].classifier.weight for s in (1, 1, 2))
    assert torch.equal(a, b) and not torch.equal(a, c)
    torch.manual_seed(0)
    before = torch.get_rng_state()
    load(pretrained, seed=5, init="random")
    assert torch.equal(before, torch.get_rng_state())


def test_random_weights_are_not_the_folder_s(pretrained) -> None:
    model, notes = load(pretrained, init="random")
    stored = load_file(pretrained / "model.safetensors")
    name = "bert.encoder.layer.0.output.dense.weight"
    assert not torch.equal(model.state_dict()[name], stored[name])
    assert notes == ["encoder: random weights, as asked (encoder.init)"]


@pytest.mark.parametrize(
    "key", ["bert.encoder.layer.1.output.dense.bias", "bert.pooler.dense.weight"]
)
def test_a_missing_key_stops(folder, key) -> None:
    edit_weights(folder, lambda state: state.pop(key))
    with pytest.raises(UserError, match=f"missing.*{key}"):
        load(folder)


def test_a_pooler_is_missed_only_where_it_is_used(folder) -> None:
    def drop(state):
        del state["bert.pooler.dense.weight"], state["bert.pooler.dense.bias"]

    edit_weights(folder, drop)
    with pytest.raises(UserError, match="missing bert.pooler"):
        load(folder)
    _, notes = load(folder, HeadSpec("span", 2))
    assert "bert.pooler is not in the folder; this task does not use it" in notes


@pytest.mark.parametrize("key", ["bert.encoder.layer.2.output.dense.bias", "bert.extra", "stray"])
def test_an_unexpected_key_stops(folder, key) -> None:
    edit_weights(folder, lambda state: state.update({key: torch.zeros(3)}))
    with pytest.raises(UserError, match=key):
        load(folder)


def test_heads_of_other_tasks_are_left_behind_in_one_line(folder) -> None:
    names = [f"cls.chain.{n}.weight" for n in range(6)]
    edit_weights(folder, lambda state: state.update({name: torch.zeros(3) for name in names}))
    assert load(folder)[1][1].startswith("left behind: cls.chain.0, cls.chain.1, ")


def test_a_fine_tuned_folder_goes_on_with_its_head(tmp_path) -> None:
    folder = tiny.finetuned(tmp_path / "two", TWO)
    model, notes = load(folder)
    assert torch.equal(
        model.classifier.weight, load_file(folder / "model.safetensors")["classifier.weight"]
    )
    assert notes == [f"classifier goes on from {folder}"]
    fresh, notes = load(folder, new_head=True)
    assert not torch.equal(model.classifier.weight, fresh.classifier.weight)
    with pytest.raises(UserError, match=r"classifier.bias is \[2\], \[3\] is needed"):
        load(folder, HeadSpec("sequence", 3, ("a", "b", "c")))
    with pytest.raises(UserError, match="tells no, yes apart, the task has yes, no"):
        load(folder, HeadSpec("sequence", 2, ("yes", "no")))
    _, notes = load(folder, HeadSpec("span", 2))
    assert "left behind: classifier" in notes


def test_half_a_head_stops(tmp_path) -> None:
    folder = tiny.finetuned(tmp_path / "two", TWO)
    edit_weights(folder, lambda state: state.pop("classifier.bias"))
    with pytest.raises(UserError, match="missing classifier.bias"):
        load(folder)


def test_a_vocabulary_of_another_size_is_refused(folder) -> None:
    (folder / "vocab.txt").write_text("\n".join([*tiny.PIECES, "more"]) + "\n")
    with pytest.raises(UserError, match=f"{len(tiny.PIECES) + 1} pieces.*have {len(tiny.PIECES)}"):
        load(folder)


def test_casing_that_does_not_fit_is_refused(folder) -> None:
    with pytest.raises(UserError, match="lowercase: false, but .* was trained with true"):
        load(folder, lowercase=False)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match="no upper-case piece"):
        load(folder, lowercase=False)
    pieces = [*tiny.PIECES[:5], *(p.upper() for p in tiny.PIECES[5:])]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    with pytest.raises(UserError, match="has upper-case pieces, but the text would be lower-cased"):
        load(folder, lowercase=True)
    config = EncoderConfig(path=str(folder))
    assert loading.read(config, 32).tokenizer.lowercase is False


def test_a_sequence_longer_than_the_positions_is_refused(pretrained) -> None:
    with pytest.raises(UserError, match="max_seq_len: 65 is more than the 64 positions"):
        loading.read(EncoderConfig(path=str(pretrained)), 65)


def test_no_folder_no_vocabulary(folder) -> None:
    with pytest.raises(UserError, match="no such folder"):
        load(folder / "nothing")
    (folder / "vocab.txt").unlink()
    with pytest.raises(UserError, match="vocab.txt: no such vocabulary file"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("config.json", {"id2label": {"a": "b"}}, "id2label: names of classes by number"),
        ("config.json", {"id2label": {"0": 1}}, "id2label: names of classes by number"),
        ("config.json", {"id2label": ["x", "y"]}, "id2label: an object is expected"),
        ("config.json", {"id2label": "x"}, 'id2label: an object is expected, not "x"'),
        ("tokenizer_config.json", [], "not a JSON object"),
        ("tokenizer_config.json", {"do_lower_case": "false"}, "do_lower_case: true or false"),
        ("tokenizer_config.json", {"tokenize_chinese_chars": 1}, "tokenize_chinese_chars: true"),
        ("tokenizer.json", [], "not a JSON object"),
        ("tokenizer.json", {"model": []}, "model: an object is expected"),
        ("tokenizer.json", {"model": WORD_PIECES}, "vocab: no pieces"),
        ("tokenizer.json", vocab(["a"]), "vocab: an object is expected"),
        ("tokenizer.json", vocab({"a": "b", "c": 1}), "ids of the vocabulary are not 0 to 1"),
        ("tokenizer.json", vocab({"a": []}), "ids of the vocabulary"),
        ("tokenizer.json", vocab(IDS) | {"normalizer": "x"}, "normalizer: an object is expected"),
        (
            "tokenizer.json",
            vocab(IDS) | NORMALIZER | {"pre_tokenizer": {"type": "BertPreTokenizer"}},
            "lowercase: true or",
        ),
    ],
)
def test_a_damaged_folder_is_named_by_file_and_key(folder, name, text, message) -> None:
    if name == "tokenizer.json":
        (folder / "vocab.txt").unlink()
        (folder / "tokenizer_config.json").unlink()
    if name == "config.json":
        tiny.edit_json(folder / name, **text)
    else:
        (folder / name).write_text(json.dumps(text))
    with pytest.raises(UserError, match=f"{name}: {message}"):
        load(folder)


@pytest.mark.parametrize("name", ["config.json", "vocab.txt", "tokenizer_config.json"])
def test_a_giant_file_is_named_and_not_read(folder, name) -> None:
    os.truncate(folder / name, 1 << 40)  # all of it a hole
    with pytest.raises(UserError, match=f"{name}: more than [0-9,]+ bytes"):
        load(folder)


@pytest.mark.parametrize("name", ["vocab.txt", "tokenizer_config.json"])
def test_a_folder_in_the_place_of_a_file_is_named(folder, name) -> None:
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(UserError, match=f"{name}: (cannot be read|Is a directory)"):
        load(folder)


@pytest.mark.parametrize("lowercase", [True, False])
def test_a_vocabulary_in_tokenizer_json_is_the_same(lowercase, folder) -> None:
    """The folder as transformers saves it, which has no vocab.txt."""
    import transformers

    pieces = [*tiny.PIECES[:-1], "z" if lowercase else "Z"]
    (folder / "vocab.txt").write_text("\n".join(pieces) + "\n")
    theirs = transformers.BertTokenizer.from_pretrained(folder, do_lower_case=lowercase)
    for name in ("vocab.txt", "tokenizer_config.json"):
        (folder / name).unlink()
    theirs.save_pretrained(folder)
    assert not (folder / "vocab.txt").exists()
    for name in (None, "tokenizer_config.json"):
        if name:
            (folder / name).unlink()
        ours = loading.read(EncoderConfig(path=str(folder)), 32).tokenizer
        assert (ours.pieces, ours.lowercase) == (pieces, lowercase)
        text = "The CATS sat, unsun Z."
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)
    tiny.edit_json(folder / "tokenizer.json", model={"type": "BPE"})
    with pytest.raises(UserError, match="tokenizer.json: not a WordPiece"):
        load(folder)


@pytest.mark.parametrize("kind", ["sequence", "choice", "span", "tokens"])
def test_hugging_face_loads_what_is_saved_and_agrees(kind, tmp_path) -> None:
    import numpy as np
    import transformers

    from finetune.examples import Item, Tokens

    head = HeadSpec(kind, 4 if kind == "choice" else 3)
    folder = tiny.finetuned(tmp_path / kind, head)
    model = load(folder, head)[0].eval()
    name = head.architecture
    theirs, info = getattr(transformers, name).from_pretrained(
        folder, output_loading_info=True, num_labels=head.width
    )
    assert not info["missing_keys"]
    assert all("pooler" in k for k in info["unexpected_keys"])
    rng = np.random.Generator(np.random.Philox(key=1))
    lengths = [[5, 9, 3, 7], [4, 8, 6, 2]] if kind == "choice" else [[5], [9], [3]]
    items = [
        Item(tuple(Tokens(rng.integers(5, 40, n), np.arange(n) // 4 % 2) for n in row), None)
        for row in lengths
    ]
    with torch.no_grad():
        batch = model.collate(items, torch.device("cpu"))
        ours = model.split(model(batch), batch)
        for item, got in zip(items, ours, strict=True):
            rows = []
            for s in item.sequences:
                ids, types = torch.from_numpy(s.ids)[None], torch.from_numpy(s.types)[None]
                if kind == "choice":
                    ids, types = ids[None], types[None]
                out = theirs.eval()(input_ids=ids, token_type_ids=types)
                if kind == "span":
                    rows.append(torch.stack([out.start_logits[0], out.end_logits[0]], -1))
                else:
                    rows.append(out.logits[0])
            wanted = torch.cat(rows) if kind == "choice" else rows[0]
            torch.testing.assert_close(torch.from_numpy(got), wanted, rtol=1e-4, atol=1e-5)


def test_a_checkpoint_s_padded_vocabulary_is_cut(tmp_path, monkeypatch) -> None:
    from types import SimpleNamespace

    shape = tiny.shape(vocab_multiple=64)
    weights = BertForPreTraining(shape, generator=torch.Generator().manual_seed(3)).state_dict()
    (tmp_path / "vocab.txt").write_text("\n".join(tiny.PIECES) + "\n")
    checkpoint = (
        dict(weights),
        SimpleNamespace(model=shape.with_vocab_size(0)),
        SimpleNamespace(dataset={"lowercase": True}, position=SimpleNamespace(step=5)),
        tmp_path,
    )
    damaged = "damaged checkpoint passed over: step-00000010"

    def load_model_state(path, passed_over, average):
        passed_over.append(damaged)
        return checkpoint

    monkeypatch.setattr(pretrain.pretrained, "load_model_state", load_model_state)
    model, notes = load(tmp_path)
    name = "bert.embeddings.word_embeddings.weight"
    assert len(weights[name]) > len(tiny.PIECES)
    assert torch.equal(model.state_dict()[name], weights[name][: len(tiny.PIECES)])
    assert notes[0] == "new layer: classifier (2 outputs)"
    assert notes[-2:] == [f"encoder: {tmp_path}, step 5", damaged]
    assert load(tmp_path, HeadSpec("span", 2))[0].qa_outputs.weight.shape == (2, 32)
    run = BertForPreTraining(shape, generator=torch.Generator().manual_seed(4))
    _, origin = pretrain.pretrained.initial_weights(
        str(tmp_path), run, Tokenizer(tiny.PIECES, True)
    )
    assert origin == f"{tmp_path}, step 5; {damaged}"


def test_a_disk_that_does_not_answer_asks_for_the_same_command_again(monkeypatch) -> None:
    def read(path, lowercase):
        raise TryAgain("no answer")

    monkeypatch.setattr(pretrain.pretrained, "read", read)
    with pytest.raises(TryAgain, match="encoder.path: no answer"):
        loading.read(EncoderConfig(path="x"), 0)


@pytest.mark.parametrize("kernel", ["varlen", "flash_attn", "sdpa"])
def test_the_attention_kernel_is_of_the_machine_and_not_of_the_pretraining(
    pretrained, monkeypatch, kernel
) -> None:
    source = pretrain.pretrained.read(str(pretrained))
    shape = source.shape.model_copy(update={"attention": kernel})
    source = dataclasses.replace(source, shape=shape)
    monkeypatch.setattr(pretrain.pretrained, "read", lambda *_: source)
    assert load(pretrained)[0].bert.config.attention == "auto"
