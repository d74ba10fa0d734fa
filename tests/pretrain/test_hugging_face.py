"""Folders out and in are each other's inverse, and Hugging Face's library agrees with both."""

import json
import os
import pickle
import resource
import shutil
from collections import OrderedDict

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from core.errors import UserError
from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain import pretrained
from pretrain.__main__ import main as command
from pretrain.hugging_face import read, write
from pretrain.loss import pretraining_loss
from pretrain.model import BertForPreTraining, ModelConfig, pack_dense
from pretrain.origin import shape_of
from pretrain.pretrained import initial_weights
from tests.pretrain.packing import STILL
from tests.pretrain.test_model import make

SHAPE = STILL.model_copy(update={"vocab_multiple": 1})
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
LETTERS = [chr(97 + i) for i in range(26)]
PIECES = SPECIALS + LETTERS + ["##" + c for c in LETTERS]
PIECES += [f"word{i}" for i in range(101 - len(PIECES))]
CASED = [p.title() if p.startswith("word") else p for p in PIECES]


@pytest.fixture
def model() -> BertForPreTraining:
    return make(SHAPE).eval()


def export(model, folder, *, pieces=PIECES, lowercase=True, by="test", **changes):
    tokenizer = Tokenizer(pieces, lowercase) if pieces is not None else None
    return write(folder, model.state_dict(), model.config, tokenizer, by=by, **changes)


@pytest.fixture
def folder(model, tmp_path):
    return export(model, tmp_path / "export", card="# card\n")


def test_transformers_loads_the_export_with_every_key_and_equal_logits(model, folder):
    peer, report = transformers.BertForPreTraining.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    assert peer.config.vocab_size == 101
    ids = torch.randint(5, 101, (2, 12), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    theirs = peer.eval()(ids, attention_mask=mask)
    packed = pack_dense(ids, mask)
    mlm, nsp = model(*packed, torch.arange(24), torch.tensor([0, 12]))
    torch.testing.assert_close(mlm, theirs.prediction_logits.flatten(0, 1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(nsp, theirs.seq_relationship_logits, rtol=1e-5, atol=1e-5)


def test_weights_that_were_read_stay_what_they_were(folder):
    """Whatever is written into their file; jobs that come later are of the same, as they say."""
    source = read(folder)
    before = {name: tensor.clone() for name, tensor in source.weights.items()}
    path = folder / "model.safetensors"
    with path.open("r+b") as file:
        file.seek(-4000, os.SEEK_END)
        file.write(bytes(4000))
    assert all(torch.equal(source.weights[name], before[name]) for name in before)
    assert source.digest != read(folder).digest


def test_a_left_to_right_export_is_hugging_faces_lm_head_model(tmp_path):
    """Equal logits and gradients; its own loss is ours over every token but the last."""
    model = make(SHAPE.model_copy(update={"is_decoder": True}))
    out = export(model, tmp_path / "export")
    assert read(out).shape == model.config
    with pytest.raises(UserError, match="is_decoder True, .* objective: left_to_right"):
        initial_weights(str(out), make(SHAPE), Tokenizer(PIECES, True))
    peer = transformers.BertLMHeadModel.from_pretrained(out, attn_implementation="eager").eval()
    assert json.loads((out / "config.json").read_text())["architectures"] == ["BertLMHeadModel"]
    ids = torch.randint(5, 101, (2, 12), generator=torch.Generator().manual_seed(0))
    theirs = peer(ids, labels=ids)
    places = torch.arange(24).view(2, 12)[:, :-1].flatten()
    packed = pack_dense(ids, torch.ones_like(ids))
    logits, nsp = model(*packed, places, places[:0])
    expected = theirs.logits[:, :-1].flatten(0, 1)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    sums = pretraining_loss(logits, ids[:, 1:].flatten(), nsp, places[:0], len(places), 0)
    torch.testing.assert_close(sums.loss, theirs.loss, rtol=1e-6, atol=1e-6)
    sums.loss.backward()
    theirs.loss.backward()
    own = dict(model.named_parameters())
    for name, parameter in peer.named_parameters():
        torch.testing.assert_close(own[name].grad, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("lowercase", [True, False])
def test_transformers_tokenises_as_we_do(model, tmp_path, lowercase):
    pieces = PIECES if lowercase else CASED
    out = export(model, tmp_path / "export", pieces=pieces, lowercase=lowercase)
    ours = Tokenizer(pieces, lowercase)
    for loader in (transformers.AutoTokenizer, transformers.BertTokenizerFast):
        theirs = loader.from_pretrained(out)
        text = "Word7, abc dé word3 zz!"
        ids = [ours.cls_id, *ours.encode(text), ours.sep_id]
        assert theirs(text)["input_ids"] == ids
        assert theirs.mask_token_id == ours.mask_id and theirs.pad_token_id == ours.pad_id
        assert theirs.model_max_length == 64


def test_import_of_an_export_is_the_identity(model, folder):
    source = read(folder)
    assert source.shape == model.config
    assert (source.tokenizer.pieces, source.tokenizer.lowercase) == (PIECES, True)
    state, own = source.weights, model.state_dict()
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
    source = read(tmp_path / "theirs")
    assert source.shape.layer_norm_eps == 1e-5 and source.tokenizer is None
    write(tmp_path / "ours", source.weights, source.shape, None, by="test")
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
    state = read(folder).weights
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
    source = read(folder)
    state = source.weights
    assert (
        source.other_heads == ["classifier.weight"]
        and "cls.predictions.decoder.weight" not in state
    )

    def untied(state):
        state["cls.predictions.decoder.weight"][3] += 1
        return state

    rewrite(folder, untied)
    with pytest.raises(UserError, match="decoder.weight differs from bert.embeddings"):
        read(folder)


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
            lambda s: s | {"bert.embeddings.position_ids": torch.ones(2, dtype=torch.bool)},
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
        read(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu_new"),
        ("model_type", "roberta"),
        ("position_embedding_type", "relative_key"),
        ("is_decoder", "no"),
        ("num_attention_heads", 5),
        ("hidden_size", 2**31),
        ("type_vocab_size", 2**63),
    ],
)
def test_other_mathematics_is_refused(folder, key, value):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    with pytest.raises(UserError, match=key):
        read(folder)


class Stranger:
    def __reduce__(self):
        return (print, ("executed",))


class Shadowed:
    """Pickled as a dictionary with an attribute in place of a method."""

    def __init__(self, content):
        self.content = content

    def __reduce__(self):
        return OrderedDict, (), {"items": 5}, None, iter(self.content.items())


def test_a_pickle_is_read_for_tensors_only(model, folder, capsys):
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match="holds neither model.safetensors nor pytorch_model.bin"):
        read(folder)
    torch.save(weights, folder / "pytorch_model.bin")
    state = read(folder).weights
    assert torch.equal(state["bert.pooler.dense.bias"], model.bert.pooler.dense.bias)
    torch.save(weights | {"x": Stranger()}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="holds more than tensors, which is not executed"):
        read(folder)
    name = "bert.pooler.dense.bias"
    named = torch.nn.Parameter(weights[name])
    named.mine = named.float = named.detach = "a word of its writer"
    torch.save(weights | {name: named}, folder / "pytorch_model.bin")
    assert torch.equal(read(folder).weights[name], weights[name])
    for odd in (
        torch._neg_view(weights[name]),
        weights[name].to_sparse(),
        weights[name].to("meta"),
        torch.zeros(1, dtype=torch.half).expand(1 << 20, 1 << 20),  # 2 TB, said in 2 bytes
    ):
        torch.save(weights | {name: odd}, folder / "pytorch_model.bin")
        with pytest.raises(UserError, match=f"{name} is not a plain tensor"):
            read(folder)
    torch.save(Shadowed(weights), folder / "pytorch_model.bin")
    assert torch.equal(read(folder).weights[name], weights[name])
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Stranger(), protocol=2))
    with pytest.raises(UserError, match="not executed|cannot be read"):
        read(folder)
    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[]"),
        ("config.json", '{"vocab_size": 0}'),
        ("config.json", '{"num_hidden_layers": 1000000000}'),
        ("config.json", '{"hidden_size": 1' + 400 * "0" + "}"),
        ("config.json", '{"hidden_size": ' + 500 * "[" + 500 * "]" + "}"),
        ("config.json", '{"id2label": {"' + 5000 * "9" + '": "a"}}'),
        ("config.json", os.mkfifo),
        ("vocab.txt", os.mkfifo),
        ("model.safetensors", os.mkfifo),
        ("model.safetensors.index.json", os.mkfifo),
        ("pytorch_model.bin", os.mkfifo),
        ("vocab.txt", None),
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[]"),
        ("model.safetensors.index.json", "[]"),
        ("model.safetensors.index.json", '{"weight_map": {"a": 3}}'),
        ("pytorch_model.bin", ""),
        ("pytorch_model.bin", "\x80\x02."),  # of which a byte before any value asks for one
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
    elif content is os.mkfifo:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
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
    state = read(folder).weights
    assert state.keys() == model.state_dict().keys()
    save_file({n: whole[n] + 1 for n in names[:1] + names[1::2]}, folder / "b.safetensors")
    with pytest.raises(UserError, match=f"b.safetensors: holds {names[0]}, as a file before"):
        read(folder)
    path.write_text(json.dumps({"weight_map": {"x": "../secret.safetensors"}}))
    with pytest.raises(UserError, match="is not a file of this folder"):
        read(folder)


def test_write_refuses_what_it_should_not(model, folder, tmp_path):
    export(model, folder, card="# new\n")
    assert (folder / "README.md").read_text() == "# new\n"
    assert (folder / "model.safetensors").stat().st_mode & 0o044 == 0o044
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(UserError, match="not written by test .it holds thesis.tex"):
        export(model, folder)
    with pytest.raises(UserError, match="101 pieces, but the model has 90"):
        export(make(SHAPE.with_vocab_size(90)), tmp_path / "x")
    state = model.state_dict() | {"odd": torch.ones(1)}
    with pytest.raises(UserError, match="unknown key odd"):
        write(tmp_path / "x", state, SHAPE, None, by="test")
    assert not (tmp_path / "x").exists() and not list(tmp_path.glob(".*"))


def test_a_full_disk_is_named_with_path_and_reason(model, tmp_path):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(UserError) as caught:
            export(model, tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert str(caught.value) == f"{tmp_path}/x/model.safetensors: File too large"
    assert not list(tmp_path.iterdir())


def test_only_what_the_same_command_wrote_is_replaced(model, folder, tmp_path, capsys):
    """Not a classifier of theirs, though transformers kept every key of our config.json."""
    theirs = transformers.BertForSequenceClassification.from_pretrained(folder, num_labels=3)
    theirs.save_pretrained(tmp_path / "theirs")
    precious = (tmp_path / "theirs" / "model.safetensors").read_bytes()
    for out in (tmp_path / "theirs", folder):
        with pytest.raises(UserError, match="not written by other .*without --force"):
            export(model, out, by="other")
    assert (tmp_path / "theirs" / "model.safetensors").read_bytes() == precious
    imported = ["import", str(folder), str(tmp_path / "theirs")]
    assert command(imported) == 2 and "--force" in capsys.readouterr().err
    assert command([*imported, "--force"]) == 0
    assert read(tmp_path / "theirs").other_heads == []
    assert command(imported) == 0  # an earlier import
    imported[1] = imported[2]
    assert command(imported) == 2 and "is the folder that is read" in capsys.readouterr().err

    shutil.copytree(tmp_path / "theirs", tmp_path / "inside")
    (tmp_path / "inside" / "README.md").unlink()
    (tmp_path / "inside" / "README.md" / "precious").mkdir(parents=True)
    imported[2] = str(tmp_path / "inside")
    assert command(imported) == 2 and "it holds README.md" in capsys.readouterr().err
    assert (
        command([*imported, "--force"]) == 2 and (tmp_path / "inside/README.md/precious").is_dir()
    )
    (tmp_path / "inside/model.safetensors").unlink()
    os.mkfifo(tmp_path / "inside/model.safetensors")  # not waited for
    (tmp_path / "inside/README.md/precious").rmdir()
    (tmp_path / "inside/README.md").rmdir()
    assert command(imported) == 2 and "do not carry that mark" in capsys.readouterr().err

    for odd, why in ((".", "wants a name"), (tmp_path / ("x" * 300), "File name too long")):
        with pytest.raises(UserError, match=why):
            export(model, odd)
    imported[2] = str(tmp_path / "not UTF-8 \udcff")
    assert command([*imported, "--force"]) == 0

    # The way to what is replaced leads through it.
    here = tmp_path / "here"
    for card in ("# first\n", "# second\n"):
        export(model, here if card == "# first\n" else here / "../here", card=card)
        assert (here / "README.md").read_text() == card
    assert len(list(tmp_path.glob("*here*"))) == 1

    # Back from a folder that is not there leads nowhere, until it is made on the way.
    for back in ("none/..", "none/../theirs"):
        imported[2] = str(tmp_path / back)
        assert command(imported) == 2 and "none: no such folder" in capsys.readouterr().err
    assert folder.exists() and not (tmp_path / "none").exists()

    home = tmp_path / "home"
    (home / "config.json").mkdir(parents=True)
    with pytest.raises(UserError, match="is not a Hugging Face folder; --force replaces nothing"):
        export(model, home, force=True)


def test_import_command_makes_a_folder_in_our_form(model, folder, tmp_path, capsys):
    heads = ("qa_outputs.bias", "cls.chain.dense.weight", "cls.chain.dense.bias", "cls.chain.bias")
    rewrite(folder, lambda s: s | {name: torch.ones(2) for name in (*heads, "x\nerror: y.w")})
    out = tmp_path / "own"
    assert command(["import", str(folder), str(out)]) == 0
    said = "left behind, of another task: cls.chain, qa_outputs, x\\nerror: y\n"
    assert said in capsys.readouterr().out
    state = read(out).weights
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(state[k], v) for k, v in model.state_dict().items())
    assert (out / "vocab.txt").read_bytes() == (folder / "vocab.txt").read_bytes()


@pytest.mark.parametrize("declared", [None, "{}", "fast"])
@pytest.mark.parametrize("lowercase", [True, False])
def test_import_keeps_tokenizer_and_casing(model, tmp_path, lowercase, declared):
    """Also where tokenizer_config.json does not tell, and where tokenizer.json is all there is."""
    pieces = PIECES if lowercase else CASED
    folder = export(model, tmp_path / "theirs", pieces=pieces, lowercase=lowercase)
    config = folder / "tokenizer_config.json"
    theirs = transformers.BertTokenizer.from_pretrained(folder)
    config.unlink()
    if declared == "fast":
        theirs.save_pretrained(folder)
        (folder / "vocab.txt").unlink(missing_ok=True)
    elif declared is not None:
        config.write_text(declared)
    assert command(["import", str(folder), str(tmp_path / "own")]) == 0
    plain = json.loads((tmp_path / "own" / "tokenizer_config.json").read_text())
    assert plain["do_lower_case"] is lowercase
    for found in (folder, tmp_path / "own"):
        tokenizer = read(found).tokenizer
        assert (tokenizer.pieces, tokenizer.lowercase) == (pieces, lowercase)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "own")
    assert again("Word7 abc")["input_ids"] == theirs("Word7 abc")["input_ids"]


CLS, SEP, A, B = (
    lambda kind, what=what, name=name: {what: {"id": name, "type_id": kind}}
    for what, name in (
        ("SpecialToken", "[CLS]"), ("SpecialToken", "[SEP]"), ("Sequence", "A"), ("Sequence", "B")
    )
)  # fmt: skip
TEMPLATE = {
    "type": "TemplateProcessing",
    "single": [CLS(0), A(0), SEP(0)],
    "pair": [CLS(0), A(0), SEP(0), B(1), SEP(1)],
    "special_tokens": {
        name: {"id": name, "ids": [PIECES.index(name)], "tokens": [name]}
        for name in ("[CLS]", "[SEP]")
    },
}
ENDS = {"sep": ["[SEP]", PIECES.index("[SEP]")], "cls": ["[CLS]", PIECES.index("[CLS]")]}
FAST = {
    "post_processor": TEMPLATE,
    "model": {"type": "WordPiece", "continuing_subword_prefix": "##"},
    "normalizer": {"type": "BertNormalizer", "lowercase": True},
    "pre_tokenizer": {"type": "BertPreTokenizer"},
}


def write_fast(folder, pieces=PIECES, **changes):
    (folder / "vocab.txt").unlink()
    vocab = {piece: number for number, piece in enumerate(pieces)}
    plain = FAST | {"model": FAST["model"] | {"vocab": vocab}} | changes
    (folder / "tokenizer.json").write_text(json.dumps(plain))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer_class", "BertJapaneseTokenizer"),
        ("do_basic_tokenize", False),
        ("truncation_side", "left"),
        ("truncation", {"direction": "Left", "max_length": 64}),
        ("model_input_names", "token_type_ids"),
        ("pre_tokenizer", {"type": "Metaspace"}),
        ("normalizer", None),
        ("vocab", "a\nb"),
        ("vocab", "\ud800"),
        ("id2label", {"9" * 5000: "a"}),
        ("id2label", {"0": "a", "00": "b"}),
        ("id2label", {"0": "a", "1": "\ud800"}),
        ("id2label", {"1": "a", "2": "b"}),
        ("cls_token", "<s>"),
        ("mask_token", {"content": "a"}),
        ("pad_token", 3),
        ("special_tokens_map.cls_token", "a"),
        ("special_tokens_map.sep_token", {"content": "a"}),
        ("special_tokens_map.sep_token", {"content": None}),
        ("unk_token", {}),
        ("post_processor", None),
        ("post_processor", []),
        ("post_processor", {"type": "ByteLevel"}),
        ("post_processor", ENDS | {"type": "RobertaProcessing"}),
        ("post_processor", ENDS | {"type": "BertProcessing", "sep": ["</s>", 9]}),
        ("post_processor", ENDS | {"type": "BertProcessing", "cls": []}),
        ("post_processor", {"type": "BertProcessing"}),
        ("post_processor", TEMPLATE | {"single": [CLS(0), A(0)]}),
        ("post_processor", TEMPLATE | {"single": [CLS(1), A(1), SEP(1)]}),
        ("post_processor", TEMPLATE | {"pair": [CLS(0), A(0), SEP(0), B(0), SEP(0)]}),
        ("post_processor", TEMPLATE | {"pair": [CLS(0), A(0), SEP(0), SEP(0), B(1), SEP(1)]}),
        ("post_processor", TEMPLATE | {"pair": [CLS(0), B(0), SEP(0), A(1), SEP(1)]}),
        ("post_processor", TEMPLATE | {"pair": "[CLS] $A [SEP] $B:1 [SEP]:1"}),
        ("post_processor", TEMPLATE | {"special_tokens": {}}),
        (
            "post_processor",
            TEMPLATE | {"special_tokens": {"[CLS]": {"ids": [2, 2]}, "[SEP]": {"ids": [3]}}},
        ),
    ],
)
def test_text_that_is_split_otherwise_is_refused_by_file_and_key(folder, key, value):
    if key in (*FAST, "truncation"):
        write_fast(folder, **{key: value})
    elif key == "vocab":
        write_fast(folder, [*PIECES[:-1], value])
    elif key.startswith("special_tokens_map."):
        name, key = key.split(".")
        (folder / f"{name}.json").write_text(json.dumps({key: value}))
    else:
        file = folder / ("config.json" if key == "id2label" else "tokenizer_config.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | {key: value}))
    with pytest.raises(UserError, match=f"{folder}/.*.json: {key}: ") as error:
        read(folder)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize(
    "name",
    [
        "vocab.txt",
        "tokenizer.json",
        "tokenizer_config.json",
        "added_tokens.json",
        "model.safetensors",
        "model.safetensors.index.json",
    ],
)
@pytest.mark.parametrize("to", ["nowhere", ""])
def test_a_link_that_leads_nowhere_is_no_file_that_is_absent(folder, name, to):
    """As of a store's folder of links whose download was broken off: what it says is not known."""
    if name.endswith("index.json"):
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif name == "vocab.txt":
        write_fast(folder)
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(to or name)
    with pytest.raises(UserError, match=f"{folder / name}: "):
        read(folder)


@pytest.mark.parametrize("read_either", [pretrained.read, shape_of])
def test_a_folder_whose_configuration_is_not_there_is_no_checkpoint_for_that(folder, read_either):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("nowhere")
    with pytest.raises(UserError, match=f"{folder / 'config.json'}: No such file"):
        read_either(str(folder))


@pytest.mark.parametrize("beside", [True, False])
@pytest.mark.parametrize(
    ("part", "key", "value"),
    [
        ("model", "type", "WordLevel"),
        ("model", "continuing_subword_prefix", "@@"),
        ("model", "unk_token", "[PAD]"),
        ("model", "max_input_chars_per_word", 5),
        ("normalizer", "clean_text", False),
    ],
)
def test_pieces_that_are_found_otherwise_are_refused(folder, part, key, value, beside):
    """Whether or not a vocab.txt with the same pieces is `beside`."""
    vocab = (folder / "vocab.txt").read_text()
    write_fast(folder)
    assert read(folder).tokenizer.pieces == PIECES
    fast = json.loads((folder / "tokenizer.json").read_text())
    fast[part][key] = value
    (folder / "tokenizer.json").write_text(json.dumps(fast))
    if beside:
        (folder / "vocab.txt").write_text(vocab)
    with pytest.raises(UserError, match=f"tokenizer.json: ({part}.{key}: |not a WordPiece)"):
        read(folder)


def test_two_vocabularies_in_one_folder_are_refused(folder):
    vocab = (folder / "vocab.txt").read_text()
    for pieces in (PIECES, [*PIECES[:-2], PIECES[-1], PIECES[-2]], [*PIECES[:-1], "other"]):
        (folder / "vocab.txt").touch()
        write_fast(folder, pieces)
        (folder / "vocab.txt").write_text(vocab)
        if pieces == PIECES:
            assert read(folder).tokenizer.pieces == PIECES
        else:
            with pytest.raises(
                UserError, match="vocab.txt: piece (99|100), 'word[0-9]+', is anoth"
            ):
                read(folder)


def test_a_vocabulary_that_was_cut_is_refused(model, folder):
    """Its file would end at the next multiple of two."""
    write_fast(folder)
    (folder / "vocab.txt").write_text("".join(piece + "\n" for piece in PIECES[:-1]))
    with pytest.raises(UserError, match="vocab.txt: 100 pieces, but tokenizer.json .* has 101"):
        read(folder)


def test_casing_is_of_the_file_that_hugging_face_goes_by(model, tmp_path):
    folder = export(model, tmp_path / "theirs", pieces=CASED, lowercase=False)
    transformers.BertTokenizer.from_pretrained(folder).save_pretrained(folder)
    said = {"tokenizer_class": "PreTrainedTokenizerFast", "do_lower_case": True}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = read(folder).tokenizer
    assert not ours.lowercase
    assert theirs("Word7 abc", add_special_tokens=False)["input_ids"] == ours.encode("Word7 abc")


def test_the_class_of_config_json_counts_where_the_tokenizer_names_none(folder):
    kinds = {"tokenizer_config.json": None, "config.json": "BertJapaneseTokenizer"}
    for name, kind in kinds.items():
        plain = json.loads((folder / name).read_text())
        assert read(folder).tokenizer is not None
        (folder / name).write_text(json.dumps(plain | {"tokenizer_class": kind}))
    with pytest.raises(UserError, match=f"{folder}/config.json: tokenizer_class: .BertJapanese"):
        read(folder)


ALL_INPUTS = ["input_ids", "token_type_ids", "attention_mask"]


@pytest.mark.parametrize("file", ["tokenizer_config.json", "config.json"])
@pytest.mark.parametrize(
    "kind",
    [None, "BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast", "TokenizersBackend"],
)
@pytest.mark.parametrize("names", [None, ["input_ids", "attention_mask"], ALL_INPUTS])
def test_whether_pairs_get_types_is_known_as_transformers_knows_it(
    folder, tmp_path, capsys, file, kind, names
):
    transformers.BertTokenizer.from_pretrained(folder).save_pretrained(folder)
    said = {} if names is None else {"model_input_names": names}
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    plain = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps(plain | {"tokenizer_class": kind}))
    theirs = transformers.AutoTokenizer.from_pretrained(folder)("word1", "word2")
    untyped = "token_type_ids" not in theirs
    line = f"{folder / 'tokenizer_config.json'}: model_input_names: no token_type_ids, so"
    assert read(folder).untyped.startswith(line) is untyped
    assert untyped or theirs["token_type_ids"] == [0, 0, 0, 1, 1]
    assert command(["import", str(folder), str(tmp_path / "own")]) == 0
    assert (line in capsys.readouterr().out) is untyped
    assert not read(tmp_path / "own").untyped


def test_tensors_that_share_their_memory_are_written_each(model, folder, tmp_path):
    state, names = model.state_dict(), ("bert.pooler.dense.bias", "bert.embeddings.LayerNorm.bias")
    state |= dict.fromkeys(names, torch.arange(32.0))
    write(tmp_path / "out", state, model.config, None, by="test")
    found = read(tmp_path / "out").weights
    assert all(found[name].tolist() == list(range(32)) for name in names)


@pytest.mark.parametrize("fast", [True, False])
def test_tokens_that_were_added_are_left_out_and_said(model, folder, tmp_path, capsys, fast):
    """A tokenizer finds them in the text before it splits it, which ours does not do."""
    more = make(SHAPE.with_vocab_size(103))
    write(folder, more.state_dict(), more.config, None, by="test")
    (folder / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    added = {"[DRUG]": 101, "[GENE]": 102}
    if fast:
        tokens = [{"id": number, "content": name} for name, number in added.items()]
        write_fast(folder, added_tokens=tokens)
    else:
        (folder / "added_tokens.json").write_text(json.dumps(added))
    assert command(["import", str(folder), str(tmp_path / "own")]) == 0
    assert "without the tokens added to it: [DRUG], [GENE]" in capsys.readouterr().out
    assert read(tmp_path / "own").shape == SHAPE


SPECIAL_ROWS = {str(n): {"content": token} for n, token in enumerate(SPECIALS)}


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("tokenizer.json", {"added_tokens": [{"id": 101, "content": "covid19"}]}),
        ("tokenizer.json", {"added_tokens": [{"id": 99, "content": "covid19"}]}),
        ("added_tokens.json", {"covid19": 101}),
        ("tokenizer_config.json", {"added_tokens_decoder": {"101": {"content": "covid19"}}}),
        ("tokenizer_config.json", {"additional_special_tokens": ["covid19"]}),
        ("tokenizer_config.json", {"extra_special_tokens": ["covid19"]}),
        ("tokenizer_config.json", {"extra_special_tokens": {"drug_token": "covid19"}}),
        ("tokenizer_config.json", {"bos_token": "covid19"}),
        ("special_tokens_map.json", {"additional_special_tokens": [{"content": "covid19"}]}),
        ("special_tokens_map.json", {"eos_token": {"content": "covid19"}}),
    ],
)
def test_added_tokens_are_told_wherever_they_are_said(folder, file, content):
    if file == "tokenizer.json":
        write_fast(folder, **content)
    else:
        (folder / file).write_text(json.dumps(content))
    assert read(folder).left_out == (
        f"{folder / file}: without the tokens added to it: covid19; text that spells them is split "
        "as any other"
    )
    weights = initial_weights(str(folder), make(SHAPE), Tokenizer(PIECES, True))
    assert f"{folder / file}: without the tokens added to it: covid19" in weights[1]


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"added_tokens_decoder": SPECIAL_ROWS},
        {"additional_special_tokens": [], "bos_token": None, "eos_token": "[SEP]"},
        {"add_bos_token": False, "extra_special_tokens": {}},
        {"additional_special_tokens": 3, "added_tokens_decoder": {"x": "y", "1": 2}},
    ],
)
def test_of_the_five_special_tokens_nothing_is_said(folder, said):
    tokens = [{"id": n, "content": token} for n, token in enumerate(SPECIALS)]
    write_fast(folder, added_tokens=[*tokens, 3])
    (folder / "added_tokens.json").write_text(json.dumps({"[MASK]": 4}))
    (folder / "tokenizer_config.json").write_text(json.dumps(said))
    assert read(folder).left_out == ""


def test_of_many_added_tokens_the_first_are_named(folder):
    tokens = {f"w{n}" + "x" * 1000 * (n == 1): 101 + n for n in range(1000)}
    (folder / "added_tokens.json").write_text(json.dumps(tokens))
    said = read(folder).left_out
    assert "w0, w1xx" in said and "..., w2, w3, w4 and 995 more; " in said
    assert len(said) < 300 + len(str(folder))


def test_a_pipe_in_place_of_a_file_is_not_waited_for(folder):
    for name in ("vocab.txt", "config.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(UserError, match=f"{name}: not a regular file"):
            read(folder)


# --------------------------------------------------------------------------------------- init_from


def run_model(**changes) -> BertForPreTraining:
    """A run's model before its first step, with a vocabulary padded to 128."""
    shape = ModelConfig(**(SHAPE.model_dump() | {"vocab_multiple": 64} | changes))
    return BertForPreTraining(shape, generator=torch.Generator().manual_seed(5))


def test_starting_weights_fit_the_run_and_say_what_is_new_or_left(model, folder):
    def encoder_and_classifier(state):
        kept = {k: v for k, v in state.items() if not k.startswith("cls.seq_relationship.")}
        return kept | {"classifier.weight": torch.ones(3, 32), "cls.chain.bias": torch.ones(1)}

    rewrite(folder, encoder_and_classifier)
    run = run_model()
    weights, origin = initial_weights(str(folder), run, Tokenizer(PIECES, True))
    run.load_state_dict(weights, strict=True)
    assert "left behind, of another task: classifier, cls.chain" in origin
    assert origin.endswith("new, because it has none: cls.seq_relationship")
    ours = model.state_dict()
    for name, tensor in run.state_dict().items():
        if not name.startswith("cls.seq_relationship."):
            assert torch.equal(tensor[: len(ours[name])], ours[name]), name
    assert not run.bert.embeddings.word_embeddings.weight[101:].any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_attention_heads": 2}, "num_attention_heads 4, .* says 2; .*heads: 4$"),
        ({"layer_norm_eps": 1e-5}, "layer_norm_eps 1e-12, .* says 1e-05; .*layer_norm_eps: 1e-12"),
        ({"num_hidden_layers": 1}, "num_hidden_layers 2, .* says 1"),
    ],
)
def test_another_function_is_not_started_from(folder, change, message):
    """Weights of the same shapes mean something else with other heads or another epsilon."""
    with pytest.raises(UserError, match=f"init_from: {folder} has {message}"):
        initial_weights(str(folder), run_model(**change), Tokenizer(PIECES, True))


@pytest.mark.parametrize(("count", "own"), [(104, True), (102, False)])
def test_a_vocabulary_that_lost_a_line_is_refused(tmp_path, count, own):
    """A bit of a line end has turned: what is left is no vocabulary and its padding."""
    pieces = [*PIECES, *"123"][:count]
    folder = export(make(SHAPE.with_vocab_size(count)), tmp_path / "export", pieces=pieces)
    if not own:
        save_file(load_file(folder / "model.safetensors"), folder / "model.safetensors")
    text = (folder / "vocab.txt").read_text()
    (folder / "vocab.txt").write_text(text.replace("word1\n", "word1*"))
    said = f"vocab.txt: {count - 1} pieces, but the weights beside it have {count}"
    with pytest.raises(UserError, match=said):
        read(folder)


def test_a_vocabulary_in_proc_is_one_line(folder, tmp_path, capsys):
    (folder / "vocab.txt").unlink()
    (folder / "vocab.txt").symlink_to("/proc/self/status")
    assert command(["import", str(folder), str(tmp_path / "own")]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: {folder}/vocab.txt: ") and said.count("\n") == 1


def test_rows_that_pad_the_vocabulary_are_left_out(model, folder, tmp_path, capsys):
    """As 30,522 pieces have 30,592 rows; heads of a model are padded with its embeddings."""
    padded = make(SHAPE.with_vocab_size(104))
    plain = write(tmp_path / "padded", padded.state_dict(), padded.config, None, by="test")
    save_file(load_file(plain / "model.safetensors"), plain / "model.safetensors")  # another's
    (plain / "vocab.txt").write_text("".join(f"{piece}\n" for piece in PIECES))
    assert command(["import", str(plain), str(tmp_path / "own")]) == 0
    assert "without 3 rows that pad its vocabulary" in capsys.readouterr().out
    for place in (plain, tmp_path / "own"):
        source = read(place)
        assert source.shape == SHAPE
        run = run_model()
        run.load_state_dict(initial_weights(str(place), run, Tokenizer(PIECES, True))[0])
        for name, tensor in source.weights.items():
            assert torch.equal(tensor, padded.state_dict()[name][: len(tensor)]), name
            assert torch.equal(run.state_dict()[name][: len(tensor)], tensor), name
    for pieces in ([*PIECES, *"ABCD"], PIECES[:60]):  # more than rows; fewer than padding explains
        (plain / "vocab.txt").write_text("".join(f"{piece}\n" for piece in pieces))
        with pytest.raises(UserError, match=f"vocab.txt: {len(pieces)} pieces, but the weights"):
            read(plain)


def test_another_vocabulary_is_not_started_from(model, folder, tmp_path):
    swapped = [*PIECES[:70], PIECES[71], PIECES[70], *PIECES[72:]]
    message = (
        f"init_from: {folder} has another vocabulary than the data set: piece 70 is '{PIECES[70]}' "
        f"there, '{PIECES[71]}' here; prepare the data set with vocabulary.path: "
        f"{folder}, or .*data.accept_changed: .vocab_sha256."
    )
    path, run, accepted = str(folder), run_model(), ["vocab_sha256"]
    with pytest.raises(UserError, match=message):
        initial_weights(path, run, Tokenizer(swapped, True))
    with pytest.raises(UserError, match="is not the folder whose vocabulary .*extend.from named"):
        initial_weights(path, run, Tokenizer(swapped, True), (), "0" * 64)
    assert "not the data set's" in initial_weights(path, run, Tokenizer(swapped, True), accepted)[1]

    fewer = run_model(vocab_size=80)
    with pytest.raises(UserError, match="101 pieces there, 80 here"):
        initial_weights(path, fewer, Tokenizer(PIECES[:80], True))
    weights, _ = initial_weights(path, fewer, Tokenizer(PIECES[:80], True), accepted)
    fewer.load_state_dict(weights, strict=True)
    name = "bert.embeddings.word_embeddings.weight"
    assert torch.equal(weights[name][:80], model.state_dict()[name][:80])
    assert not weights[name][80:].any()

    with pytest.raises(UserError, match="trained with lowercase: true, .*accept_changed: .lowerc"):
        initial_weights(path, run, Tokenizer(PIECES, False))
    initial_weights(path, run, Tokenizer(PIECES, False), ["lowercase"])

    (folder / "vocab.txt").unlink()
    with pytest.raises(UserError, match="no vocab.txt or tokenizer.json to compare"):
        initial_weights(path, run, Tokenizer(PIECES, True))
    initial_weights(path, run, Tokenizer(PIECES, True), accepted)


def test_words_in_place_of_unused_pieces_begin_as_the_mean_of_their_old_ones(model, tmp_path):
    """Allowed where the data set says which vocabulary its own extends, and of [unusedN] alone."""
    old = [*PIECES[:90], "[unused0]", "word90", "[unused1]", *PIECES[93:]]
    folder = export(model, tmp_path / "old", pieces=old)
    new, base = [*old[:90], "abba", *old[91:92], "cab", *old[93:]], Tokenizer(old, True)
    weights, origin = initial_weights(
        str(folder), run_model(), Tokenizer(new, True), (), base.sha256
    )
    assert origin.endswith("; 2 words of the data set begin as the mean of their old pieces")
    ours = model.state_dict()
    for name in ("bert.embeddings.word_embeddings.weight", "cls.predictions.bias"):
        expected = ours[name].clone()
        expected[90] = sum(ours[name][old.index(p)] for p in ("a", "##b", "##b", "##a")) / 4
        expected[92] = sum(ours[name][old.index(p)] for p in ("c", "##a", "##b")) / 3
        torch.testing.assert_close(weights[name][:101], expected, rtol=1e-6, atol=1e-7)
        assert torch.equal(weights[name][101:], run_model().state_dict()[name][101:])
    others = weights.keys() - {"bert.embeddings.word_embeddings.weight", "cls.predictions.bias"}
    assert all(torch.equal(weights[name], ours[name]) for name in others)

    def refused(pieces, extends, lowercase=True):
        with pytest.raises(UserError) as caught:
            initial_weights(str(folder), run_model(), Tokenizer(pieces, lowercase), (), extends)
        return str(caught.value)

    assert "piece 90 is '[unused0]' there, 'abba' here" in refused(new, None)
    other = refused(new, Tokenizer(PIECES, True).sha256)
    assert "is not the folder whose vocabulary the data set extends" in other
    swapped = [*new[:95], new[96], new[95], *new[97:]]
    assert "piece 90 is" in refused(swapped, base.sha256)
    assert "lowercase" in refused(new, base.sha256, lowercase=False)
    nothing = [*new[:90], "\u0301", *new[91:]]  # an accent, which normalisation takes away
    assert "piece 90 of the data set, '\u0301' in place of [unused0]" in (
        refused(nothing, base.sha256)
    )


def test_a_name_of_the_hub_is_told_from_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    names = {"bert-base-uncased": True, "org/bert": True, "runs/base": False, "/no/such/run": False}
    for name, hint in names.items():
        with pytest.raises(UserError, match=f"^{name}: no such folder") as error:
            initial_weights(name, run_model(), Tokenizer(PIECES, True))
        assert ("import hf:" in str(error.value)) is hint
        assert ("hf download" in str(error.value)) is not hint
