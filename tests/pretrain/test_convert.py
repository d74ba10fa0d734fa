"""Export and import are each other's inverse, and Hugging Face's library agrees with both."""

import json
import pickle

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from core.errors import UserError
from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain import convert
from pretrain.__main__ import main as command
from pretrain.convert import export_hugging_face, import_hugging_face, initial_weights
from pretrain.model import BertForPreTraining, pack_dense
from tests.pretrain.packing import STILL
from tests.pretrain.test_model import make

SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


@pytest.fixture
def model() -> BertForPreTraining:
    model = make(STILL).eval()
    with torch.no_grad():  # as in training: rows that pad the vocabulary stay 0
        model.bert.embeddings.word_embeddings.weight[101:] = 0
        model.cls.predictions.bias[101:] = 0
    return model


@pytest.fixture
def vocab(tmp_path):
    letters = [chr(97 + i) for i in range(26)]
    pieces = SPECIALS + letters + ["##" + c for c in letters]
    pieces += [f"word{i}" for i in range(101 - len(pieces))]
    path = tmp_path / "vocab.txt"
    path.write_text("\n".join(pieces) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def folder(model, vocab, tmp_path):
    out = tmp_path / "export"
    export_hugging_face(model.state_dict(), model.config, vocab, True, out, "# card\n")
    return out


def test_transformers_loads_the_export_with_every_key_and_equal_logits(model, folder):
    peer, report = transformers.BertForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert peer.config.vocab_size == 101
    ids = torch.randint(5, 101, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    theirs = peer.eval()(ids, attention_mask=mask)
    packed = pack_dense(ids, mask)
    mlm, nsp = model(*packed, torch.arange(24), torch.tensor([0, 12]))
    torch.testing.assert_close(
        mlm[:, :101], theirs.prediction_logits.flatten(0, 1), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(nsp, theirs.seq_relationship_logits, rtol=1e-5, atol=1e-5)
    assert mlm[:, 101:].isneginf().all()


@pytest.mark.parametrize("lowercase", [True, False])
def test_transformers_tokenises_as_we_do(model, vocab, tmp_path, lowercase):
    out = tmp_path / "export"
    export_hugging_face(model.state_dict(), model.config, vocab, lowercase, out, "")
    ours = Tokenizer.from_file(vocab, lowercase)
    for loader in (transformers.AutoTokenizer, transformers.BertTokenizerFast):
        theirs = loader.from_pretrained(out)
        text = "Word7, abc dé word3 zz!"
        ids = [ours.cls_id, *ours.encode(text), ours.sep_id]
        assert theirs(text)["input_ids"] == ids
        assert theirs.mask_token_id == ours.mask_id and theirs.pad_token_id == ours.pad_id
        assert theirs.model_max_length == 64


def test_import_of_an_export_is_the_identity(model, folder):
    state, config = import_hugging_face(folder, vocab_multiple=32)
    assert config == model.config
    own = model.state_dict()
    assert state.keys() == own.keys()
    for name, tensor in own.items():
        assert torch.equal(state[name], tensor), name


def test_export_of_an_import_is_the_identity(tmp_path):
    config = transformers.BertConfig(
        vocab_size=77,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=40,
        layer_norm_eps=1e-5,
    )
    peer = transformers.BertForPreTraining(config)
    peer.save_pretrained(tmp_path / "theirs")
    state, shape = import_hugging_face(tmp_path / "theirs")
    assert shape.layer_norm_eps == 1e-5 and shape.padded_vocab_size == 128
    export_hugging_face(state, shape, None, True, tmp_path / "ours", "")
    before = load_file(tmp_path / "theirs" / "model.safetensors")
    after = load_file(tmp_path / "ours" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name


def rewrite(folder, change):
    path = folder / "model.safetensors"
    state = change(load_file(path))
    save_file({k: v.contiguous() for k, v in state.items()}, path, metadata={"format": "pt"})


def test_encoder_alone_without_prefix_and_with_old_names_is_understood(model, folder):
    def encoder_only(state):
        state = {k.removeprefix("bert."): v for k, v in state.items() if k.startswith("bert.")}
        state = {k.replace("LayerNorm.weight", "LayerNorm.gamma"): v for k, v in state.items()}
        return state | {"embeddings.position_ids": torch.arange(64)[None]}

    rewrite(folder, encoder_only)
    state, _ = import_hugging_face(folder, vocab_multiple=32)
    own = {k: v for k, v in model.state_dict().items() if k.startswith("bert.")}
    assert state.keys() == own.keys()
    assert all(torch.equal(state[k], own[k]) for k in own)


def test_decoder_stored_twice_is_checked_and_task_heads_come_along(folder):
    def with_decoder(state):
        return state | {
            "cls.predictions.decoder.weight": state[
                "bert.embeddings.word_embeddings.weight"
            ].clone(),
            "cls.predictions.decoder.bias": state["cls.predictions.bias"].clone(),
            "classifier.weight": torch.ones(3, 32),
        }

    rewrite(folder, with_decoder)
    state, _ = import_hugging_face(folder)
    assert "classifier.weight" in state and "cls.predictions.decoder.weight" not in state

    def untied(state):
        state["cls.predictions.decoder.weight"][3] += 1
        return state

    rewrite(folder, untied)
    with pytest.raises(UserError, match="decoder.weight differs from bert.embeddings"):
        import_hugging_face(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s | {"bert.extra": torch.ones(1)}, "unknown key bert.extra"),
        (
            lambda s: {k: v for k, v in s.items() if k != "bert.encoder.layer.1.output.dense.bias"},
            "missing key bert.encoder.layer.1.output.dense.bias",
        ),
        (
            lambda s: {k: v for k, v in s.items() if k != "cls.predictions.bias"},
            "missing key cls.predictions.bias",
        ),
        (
            lambda s: s | {"bert.pooler.dense.bias": torch.ones(31)},
            r"bert.pooler.dense.bias is \[31\], config says \[32\]",
        ),
        (
            lambda s: s | {"bert.embeddings.position_ids": torch.arange(64) + 1},
            "position_ids do not count from 0",
        ),
        (
            lambda s: s | {"bert.pooler.dense.bias": torch.full((32,), torch.nan)},
            "bert.pooler.dense.bias holds values that are not finite",
        ),
        (
            lambda s: s | {"bert.pooler.dense.bias": torch.ones(32, dtype=torch.int32)},
            "bert.pooler.dense.bias holds values that are not finite real",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_one_line(folder, change, message):
    rewrite(folder, change)
    with pytest.raises(UserError, match=message) as error:
        import_hugging_face(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu_new"),
        ("model_type", "roberta"),
        ("position_embedding_type", "relative_key"),
        ("is_decoder", True),
        ("num_attention_heads", 5),
    ],
)
def test_other_mathematics_is_refused(folder, key, value):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match=key):
        import_hugging_face(folder)


class Stranger:
    def __reduce__(self):
        return (print, ("executed",))


def test_a_pickle_is_read_for_tensors_only(model, folder, capsys):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds neither model.safetensors nor pytorch_model.bin"):
        import_hugging_face(folder)
    torch.save(weights, folder / "pytorch_model.bin")
    state, _ = import_hugging_face(folder)
    assert torch.equal(state["bert.pooler.dense.bias"], model.bert.pooler.dense.bias)
    torch.save(weights | {"x": Stranger()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="holds more than tensors, which is not executed"):
        import_hugging_face(folder)
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Stranger(), protocol=2))
    with pytest.raises(UserError, match="not executed|cannot be read"):
        import_hugging_face(folder)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[]"),
        ("config.json", '{"vocab_size": 0}'),
        ("config.json", '{"num_hidden_layers": 1000000000}'),
        ("vocab.txt", None),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("model.safetensors.index.json", "[]"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 3}}'),
        ("pytorch_model.bin", ""),
        ("pytorch_model.bin", [torch.zeros(1)]),
        ("pytorch_model.bin", {3: torch.zeros(1)}),
    ],
)
def test_odd_files_are_one_line_that_names_them(folder, tmp_path, capsys, name, content):
    if name.startswith(("model", "pytorch")):
        (folder / "model.safetensors").unlink()
    if content is None:
        (folder / name).unlink()
        (folder / name).mkdir()
    elif isinstance(content, str):
        (folder / name).write_text(content)
    else:
        torch.save(content, folder / name)
    assert command(["import", str(folder), str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {folder / name}: ") and said.count("\n") == 1


def test_weights_in_parts_are_put_together(model, folder):
    whole = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in parts.items():
        save_file({n: whole[n] for n in part}, folder / file)
    index = {"weight_map": {n: file for file, part in parts.items() for n in part}}
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps(index))
    state, _ = import_hugging_face(folder, vocab_multiple=32)
    assert state.keys() == model.state_dict().keys()
    path.write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    with pytest.raises(UserError, match="is not a file of this folder"):
        import_hugging_face(folder)


def test_export_refuses_what_it_should_not_write(model, vocab, folder, tmp_path):
    state, config = model.state_dict(), model.config
    export_hugging_face(state, config, vocab, True, folder, "# new\n")
    assert (folder / "README.md").read_text() == "# new\n"
    assert (folder / "model.safetensors").stat().st_mode & 0o044 == 0o044
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="not an earlier export .it holds thesis.tex"):
        export_hugging_face(state, config, vocab, True, folder, "")
    with pytest.raises(UserError, match="101 pieces, but the model has 90"):
        export_hugging_face(state, config.with_vocab_size(90), vocab, True, tmp_path / "x", "")
    with pytest.raises(UserError, match="unknown key odd"):
        export_hugging_face(
            state | {"odd": state["cls.predictions.bias"]}, config, None, True, tmp_path / "x", ""
        )
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob(".x*"))


def test_import_command_makes_a_folder_in_our_form(model, folder, tmp_path, capsys):
    rewrite(folder, lambda s: s | {"qa_outputs.bias": torch.ones(2)})
    out = tmp_path / "own"
    assert convert.import_main([str(folder), str(out)]) == 0
    assert "left out, of another task: qa_outputs.bias" in capsys.readouterr().out
    state, _ = import_hugging_face(out, vocab_multiple=32)
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert (out / "vocab.txt").read_bytes() == (folder / "vocab.txt").read_bytes()


def test_starting_weights_fit_the_run_and_say_what_is_new_or_left(model, folder):
    def encoder_and_classifier(state):
        kept = {k: v for k, v in state.items() if not k.startswith("cls.seq_relationship.")}
        return kept | {"classifier.weight": torch.ones(3, 32)}

    rewrite(folder, encoder_and_classifier)
    run = make(STILL.model_copy(update={"vocab_multiple": 64}), seed=5)
    weights, origin = initial_weights(str(folder), run)
    run.load_state_dict(weights, strict=True)
    assert "left behind, of another task: classifier.weight" in origin
    new = "cls.seq_relationship.bias, cls.seq_relationship.weight"
    assert origin.endswith(f"new, because it has none: {new}")
    ours = model.state_dict()
    for name, tensor in run.state_dict().items():
        if not name.startswith("cls.seq_relationship."):
            assert torch.equal(tensor[: len(ours[name])], ours[name]), name
