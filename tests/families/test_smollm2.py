"""The real SmolLM2-135M-Instruct: tensors, logits, loss and every gradient equal those of transformers, the gradient agrees
with differences of the loss, and packed weights give the gradients of unpacked ones."""

from functools import cache
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter
from members import LIMIT, assert_equal_gradients, in_float64, our_gradients, their_gradients
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import handgrad as hg
from handgrad.formats.models import tokenizer_of
from handgrad.gguf.file import dequantize, open_gguf
from handgrad.gguf.model import read_model
from handgrad.proof.oracles import relative_error
from handgrad.text import downloads
from handgrad.tolerances import FINITE_DIFFERENCE_TOLERANCE

PASSAGE = (
    "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, it was"
    " the epoch of belief, it was the epoch of incredulity, it was the season of Light."
)


def without_vocabulary(path: Path, folder: Path) -> Path:
    """A copy without the arrays of the metadata: transformers spends half a minute on those of a tokenizer."""
    file = open_gguf(path)
    writer = GGUFWriter(folder / "model.gguf", file.text("general.architecture"))
    for key, value in file.metadata.items():
        kind = GGUFValueType.get_type(value)
        if kind != GGUFValueType.ARRAY and key != "general.architecture":
            writer.add_key_value(key, value, kind)
    for name, stored in file.tensors.items():
        data = stored.data.view(torch.float32).view(-1) if stored.kind == "F32" else stored.data
        writer.add_tensor(name, data.numpy(), raw_dtype=GGMLQuantizationType[stored.kind])
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    return folder / "model.gguf"


@pytest.fixture(scope="module")
def path() -> Path:
    return downloads.fetch("smollm2")[0]


@pytest.fixture(scope="module")
def theirs(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The file as transformers itself loads it."""
    folder = tmp_path_factory.mktemp("gguf")
    without_vocabulary(path, folder)
    with pytest.MonkeyPatch.context() as patch:
        # transformers makes this table once for every module of the model, for 15 seconds
        patch.setattr(gguf, "get_tensor_name_map", cache(gguf.get_tensor_name_map))
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", attn_implementation="sdpa").eval()


@pytest.fixture(scope="module")
def passage(path: Path) -> Tensor:
    return torch.tensor(tokenizer_of(path).encode(PASSAGE))


def test_configuration_and_tensors_equal_those_of_transformers(theirs: Any, path: Path) -> None:
    config, tensors, file = read_model(path)
    ours = AutoConfig.for_model(**config).to_dict()
    for name, value in theirs.config.to_dict().items():
        if name not in ("_name_or_path", "_model_name_or_path", "architectures", "quantization_config", "unk_token_id"):
            assert ours[name] == value, name
    weights = theirs.state_dict()
    assert set(weights) - {"lm_head.weight"} == set(tensors) and len(tensors) == 272
    assert tensors["model.layers.3.mlp.up_proj.weight"].kind == "Q4_1"
    assert tensors["model.embed_tokens.weight"].kind == "Q8_0"
    for name, stored in tensors.items():
        assert torch.equal(dequantize(stored), weights[name]), name
    packed = sum(stored.data.numel() for stored in tensors.values())
    assert packed == sum(stored.data.numel() for stored in file.tensors.values()) < 97e6


@pytest.mark.long
def test_logits_loss_and_every_gradient_equal_those_of_transformers(theirs: Any, passage: Tensor) -> None:
    ours = hg.load("smollm2")
    with torch.no_grad():
        expected = theirs(input_ids=passage[None]).logits[0]
    logits = ours.logits(passage[None])[0]
    assert relative_error(logits, expected.double(), floor=expected.abs().max().item()) <= 1e-4
    loss = F.cross_entropy(expected[:-1], passage[1:]).item()
    assert ours.loss(passage[:-1], passage[1:]) == pytest.approx(loss, rel=1e-4)

    tokens, targets = passage[:24], passage[1:25].clone()
    targets[:9] = -100
    wide = in_float64(theirs)
    expected_loss, grads = their_gradients(wide, tokens, targets, [16, 8])
    assert ours.double().loss_and_grads(tokens, targets, [16, 8]) == pytest.approx(expected_loss, rel=LIMIT)
    assert_equal_gradients(our_gradients(ours), grads)
    assert difference_error(ours, tokens, targets, [16, 8]) <= FINITE_DIFFERENCE_TOLERANCE


@torch.no_grad()
def difference_error(model: hg.GPT, tokens: Tensor, targets: Tensor, lengths: list[int]) -> float:
    """The gradient against the difference of the loss along one direction of all weights, random plus that of the gradient,
    relative to the gradient's norm."""
    parameters = list(model.parameters())
    grads = [p.grad for p in parameters if p.grad is not None]
    generator = torch.Generator().manual_seed(5)
    signs = [torch.randint(-1, 2, p.shape, generator=generator, dtype=torch.int8) for p in parameters]
    length = sum(x.count_nonzero().item() for x in signs) ** 0.5
    size = sum(grad.square().sum().item() for grad in grads) ** 0.5
    claimed = size + sum((grad * x).sum().item() for grad, x in zip(grads, signs, strict=True)) / length

    def moved_loss(distance: float) -> float:
        for p, grad, x in zip(parameters, grads, signs, strict=True):
            p.add_(x, alpha=distance / length).add_(grad, alpha=distance / size)
        return model.loss(tokens, targets, lengths)

    step = 1e-5
    above, below = moved_loss(step), moved_loss(-2 * step)
    return abs((above - below) / (2 * step) - claimed) / size


def test_packed_weights_give_the_gradients_of_unpacked_ones(passage: Tensor) -> None:
    found = []
    for packed in (False, True):
        model = hg.load("smollm2", packed=packed)
        hg.lora.inject(model, 4, seed=1)
        for i, p in enumerate(p for p in model.parameters() if p.requires_grad):
            p.data += 0.01 * torch.randn(p.shape, generator=torch.Generator().manual_seed(i))
        loss = model.loss_and_grads(passage[:-1], passage[1:], tokens_at_once=20)
        found.append((loss, {name: p.grad for name, p in model.named_parameters() if p.requires_grad}))
    (loss, grads), (packed_loss, packed_grads) = found
    assert loss == packed_loss and len(grads) == 2 * 210
    assert all(torch.equal(grads[name], packed_grads[name]) for name in grads)
