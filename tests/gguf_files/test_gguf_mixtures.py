"""GGUF files of mixtures, written by the tables of the gguf package from models of transformers: their logits come back,
packed experts are unpacked only if a token goes to them, and what is damaged is refused."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import handgrad as hg
from handgrad.errors import HandgradError
from handgrad.formats.gguf_out import write_gguf
from handgrad.gguf.file import open_gguf
from handgrad.model.storage.packed import Packed
from handgrad.text.tokenizer import make
from tiny_gguf import write_gguf as write

sys.path.append(str(Path(__file__).parents[1] / "families"))
from members import family_of, their_logits, their_tensors, transformers_model

NAMES = {
    "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe", "gpt_oss": "gpt-oss",
    "dots1": "dots1",
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "mixtral, 3 queries to a key": {},
    "qwen2_moe, 3 queries to a key": {"hidden_size": 36},
    "qwen3_moe, 3 queries to a key": {"norm_topk_prob": True},
    "olmoe, keys of every head": {"hidden_size": 36},
    "gpt_oss, 3 queries to a key": {},
    "gpt_oss, yarn without whole features": {},
    "dots1, groups": {"num_key_value_heads": 9},
    "dots1, not normalized": {"num_key_value_heads": 9},
}
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 259}
TOKENS = torch.randint(29, (2, 24), generator=torch.Generator().manual_seed(0))
Contents = tuple[str, dict[str, Any], dict[str, np.ndarray]]


def contents(name: str, network: Any) -> Contents:
    """The architecture, the metadata that llama.cpp's converter writes, and the tensors."""
    config, architecture = network.config, NAMES[family_of(name)]
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    d_head = getattr(config, "head_dim", None) or config.hidden_size // heads
    rope = config.rope_parameters
    values = {
        "vocab_size": config.vocab_size, "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size, "feed_forward_length": config.intermediate_size,
        "block_count": config.num_hidden_layers, "attention.head_count": heads, "attention.head_count_kv": kv_heads,
        "attention.key_length": d_head, "attention.value_length": d_head, "rope.freq_base": rope["rope_theta"],
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps, "expert_used_count": config.num_experts_per_tok,
    }  # fmt: skip
    fields = {
        "num_experts": "expert_count", "num_local_experts": "expert_count", "n_routed_experts": "expert_count",
        "moe_intermediate_size": "expert_feed_forward_length", "n_shared_experts": "expert_shared_count",
        "shared_expert_intermediate_size": "expert_shared_feed_forward_length", "n_group": "expert_group_count",
        "first_k_dense_replace": "leading_dense_block_count", "routed_scaling_factor": "expert_weights_scale",
        "topk_group": "expert_group_used_count",
    }  # fmt: skip
    values |= {key: x for field, key in fields.items() if (x := getattr(config, field, None)) is not None}
    if architecture == "dots1":
        values |= {"expert_weights_norm": config.norm_topk_prob, "expert_gating_func": 2}
    if architecture == "gpt-oss":
        values |= {
            "attention.sliding_window": config.sliding_window,
            "expert_feed_forward_length": config.intermediate_size,
        }
    if rope["rope_type"] == "yarn":
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        values["rope.scaling.original_context_length"] = rope["original_max_position_embeddings"]
    return architecture, {f"{architecture}.{key}": x for key, x in values.items()}, tensors(architecture, network)


def tensors(architecture: str, network: Any) -> dict[str, np.ndarray]:
    """By the names of the package's own table; those of experts in stacks."""
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    table = gguf.get_tensor_name_map(kind, network.config.num_hidden_layers)
    stacks: dict[str, list[np.ndarray]] = {}
    found = {}
    for name, x in their_tensors(network).items():
        w = x.detach().float().numpy()
        if architecture == "llama" and re.search("[qk]_proj", name):
            w = w.reshape(-1, 2, network.config.head_dim // 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
        plain = name.replace("e_score_correction_bias", "e_score_correction.bias").replace("sinks", "sinks.weight")
        plain = re.sub(r"block_sparse_moe\.experts", "feed_forward.experts", plain)
        if ".feed_forward." in plain:
            plain = plain.removeprefix("model.")
        gguf_name = table.get_name(re.sub(r"experts\.\d+", "experts", plain), (".weight", ".bias"))
        assert gguf_name is not None, name
        if "_exps" in gguf_name:
            stacks.setdefault(gguf_name, []).append(w)
        else:
            found[gguf_name] = w.reshape(-1) if "inp_shexp" in gguf_name else w
    return found | {name: np.stack(own) for name, own in stacks.items()}


@pytest.mark.parametrize("name", MODELS)
def test_a_mixture_of_transformers_comes_back(name: str, tmp_path: Path) -> None:
    network = transformers_model(name, **MODELS[name])
    network.load_state_dict({key: x.float().double() for key, x in network.state_dict().items()})
    found = hg.load(write(tmp_path / "m.gguf", *contents(name, network)), dtype="float64")
    expected = their_logits(network, TOKENS[0], [24])
    error = (found.logits(TOKENS[:1])[0] - expected).abs().max() / expected.abs().max()
    assert error < 1e-6  # the file rounds ε to float32


def mixtral(folder: Path, change: Callable[[dict[str, Any], dict[str, np.ndarray]], object]) -> Path:
    torch.manual_seed(0)
    network = transformers_model("mixtral, 3 queries to a key", vocab_size=29)
    architecture, metadata, written = contents("mixtral", network)
    change(metadata, written)
    return write(folder / "changed.gguf", architecture, metadata, written)


def apart(_: dict[str, Any], written: dict[str, np.ndarray]) -> None:
    """A tensor for every expert, as files of 2023 have them."""
    for name in [name for name in written if "_exps" in name]:
        written |= {name.replace("_exps", f".{e}"): w for e, w in enumerate(written.pop(name))}


def test_older_files_have_a_tensor_for_every_expert(tmp_path: Path) -> None:
    stacked = dict(hg.load(mixtral(tmp_path / "new", lambda *_: None)).named_parameters())
    old = mixtral(tmp_path / "old", apart)
    for name, p in hg.load(old).named_parameters():
        assert torch.equal(p, stacked[name]), name


def test_an_older_file_is_not_repacked(tmp_path: Path) -> None:
    def with_tokenizer(metadata: dict[str, Any], written: dict[str, np.ndarray]) -> None:
        apart(metadata, written)
        metadata["tokenizer.ggml.model"] = "gpt2"

    with pytest.raises(HandgradError, match="a tensor for every expert, which llama"):
        write_gguf(str(mixtral(tmp_path, with_tokenizer)), tmp_path / "out.gguf")


def put(key: str, value: Any) -> Callable[[dict[str, Any], dict[str, np.ndarray]], None]:
    def change(metadata: dict[str, Any], written: dict[str, np.ndarray]) -> None:
        table: dict[str, Any] = written if key.startswith("blk") else metadata
        table.pop(key, None)
        if value is not None:
            table[key] = value

    return change


EXPS = "blk.1.ffn_up_exps.weight"
REFUSED = {
    "no number of used experts": (put("llama.expert_used_count", None), "has no llama.expert_used_count"),
    "more experts used than there are": (put("llama.expert_used_count", 6), "num_experts_per_tok|experts_per_token"),
    "a number that no stack has": (put("llama.expert_count", 6), "has the shape .5, .*expected .6, "),
    "far too many experts": (put("llama.expert_count", 1 << 30), "must be an integer of at most 2,048"),
    "a text": (put("llama.expert_count", "many"), "llama.expert_count is .many., not an integer"),
    "a stack of two dimensions": (
        put(EXPS, np.zeros((55, 18), np.float32)),
        "has the shape .55, 18., expected .5, 11, 18",
    ),
    "no stack": (put(EXPS, None), f"has no tensor {EXPS}"),
    "one expert alone": (
        put("blk.1.ffn_up.3.weight", np.zeros((11, 18), np.float32)),
        "is not part of this architecture",
    ),
    "a shared expert": (put("llama.expert_shared_count", 1), "llama.expert_shared_count is 1, which is not supported"),
    "a feed-forward layer besides": (put("blk.0.ffn_up.weight", np.zeros((11, 18), np.float32)), "is not part of this"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_damaged_is_refused(name: str, tmp_path: Path) -> None:
    change, message = REFUSED[name]
    with pytest.raises(HandgradError, match=message):
        hg.load(mixtral(tmp_path, change))


def test_another_router_is_refused(tmp_path: Path) -> None:
    network = transformers_model("dots1, groups", num_key_value_heads=9)
    architecture, metadata, written = contents("dots1", network)
    metadata["dots1.expert_gating_func"] = 1
    with pytest.raises(HandgradError, match="expert_gating_func is 1; only 2 is supported"):
        hg.load(write(tmp_path / "m.gguf", architecture, metadata, written))


def saved(folder: Path, name: str = "mixtral, many experts") -> Path:
    transformers_model(name, **SIZES).float().save_pretrained(folder)
    make("bytes", []).write(folder)
    return folder


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_1", "BF16", "MXFP4"])
@pytest.mark.parametrize("recompute", ["none", "blocks"])
@pytest.mark.some_cases(3)
def test_packed_gradients_equal_unpacked_ones(kind: str, recompute: str, tmp_path: Path) -> None:
    write_gguf(str(saved(tmp_path / "model")), tmp_path / "m.gguf", kind)
    stored = open_gguf(tmp_path / "m.gguf").tensors["blk.0.ffn_up_exps.weight"]
    assert stored.kind == kind and stored.shape == (40, 96, 64)
    results = []
    for packed in (False, True):
        model = hg.load(tmp_path / "m.gguf", packed=packed)
        hg.lora.inject(model, 2, seed=1)
        for layer in hg.lora.adapters_of(model).values():
            layer.up.data += 0.1
        loss = model.loss_and_grads(TOKENS, TOKENS.flip(1), recompute=recompute)
        results.append((loss, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}))
    (loss, expected), (other, found) = results
    assert loss == other and expected.keys() == found.keys() and len(expected) > 100
    assert all(torch.equal(grad, found[name]) for name, grad in expected.items())


def test_only_experts_with_rows_are_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_gguf(str(saved(tmp_path / "model")), tmp_path / "m.gguf", "Q8_0")
    model = hg.load(tmp_path / "m.gguf", packed=True)
    numbers = {id(layer.packed): name for name, layer in hg.lora.layers_of(model).items()}
    unpacked: list[str] = []
    before = Packed.unpack

    def unpack(self: Packed, *arguments: Any, **options: Any) -> torch.Tensor:
        unpacked.append(numbers.get(id(self), ""))
        return before(self, *arguments, **options)

    monkeypatch.setattr(Packed, "unpack", unpack)
    model.logits(TOKENS[:1, :3])
    experts = [name for name in unpacked if ".experts." in name]
    assert len(experts) == len(set(experts)) <= 2 * 3 * 3 * 2, (
        "two blocks, three matrices, three tokens, two experts each"
    )
    largest = 3 * 4 * 96 * 64  # the matrices of one expert
    assert model.scratch is not None and model.scratch.nbytes <= 4 * 4 * 64 * 64 * 3 + largest


def test_a_packed_mixture_generates(tmp_path: Path) -> None:
    write_gguf(str(saved(tmp_path / "model")), tmp_path / "m.gguf", "Q8_0")
    plain, packed = hg.load(tmp_path / "m.gguf"), hg.load(tmp_path / "m.gguf", packed=True)
    prompts = TOKENS[:1, :9]
    expected = hg.generate(plain, prompts, 12, stop_at_end=False)
    assert torch.equal(hg.generate(packed, prompts, 12, stop_at_end=False), expected)
