"""The state of short convolutions in generation: through the cache, in any pieces and with shared beginnings, every token is
that of the full pass."""

from collections.abc import Callable

import pytest
import torch

import handgrad as hg
from conftest import perturb
from handgrad.inference import conv_state
from handgrad.inference.conv_state import ConvState
from handgrad.inference.engine import Engine, Options
from handgrad.inference.kv_cache import BlockCache
from handgrad.model.gpt import GPT
from handgrad.proof.oracles import relative_error
from handgrad.tolerances import IDENTITY_TOLERANCE


def make(conv_blocks: tuple[int, ...] = (0, 2), taps: int = 3, n_context: int = 200, **changes: object) -> GPT:
    shape = {"n_vocab": 31, "d_model": 16, "n_heads": 4, "n_kv_heads": 2, "n_blocks": 3, "d_hidden": 20}
    conv = {"family": "lfm2", "qk_norm": True, "conv_blocks": conv_blocks, "conv_taps": taps, "conv_bias": True}
    config = hg.preset("nano-llama", n_context=n_context, **{**shape, **conv, **changes})
    model = GPT(config, seed=2, dtype=torch.float64)
    perturb(model)
    return model


def prompts_of(lengths: list[int]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(31, (n,), generator=generator).tolist() for n in lengths]


def check(model: GPT, sequences: list, least: int = 1) -> None:
    """Greedy tokens, and the log-probabilities of all tokens, are those of the model's logits."""
    for x in sequences:
        ids = torch.tensor(x.prompt + x.new)
        expected = torch.log_softmax(model.logits(ids), 1)
        assert len(x.new) >= least
        start = len(x.prompt) - 1
        assert x.new == expected[start:-1].argmax(1).tolist()
        given = torch.tensor([y.logprob for y in x.logprobs], dtype=torch.float64)
        assert relative_error(given, expected[start:-1].max(1).values) <= IDENTITY_TOLERANCE


def run(engine: Engine) -> None:
    while engine.busy:
        engine.step()


@pytest.mark.parametrize("taps", [1, 2, 3, 5])
@pytest.mark.parametrize("conv_blocks", [(0, 2), (1,), (0, 1, 2), ()])
@pytest.mark.parametrize("at_once", [1, 2, 7, 1024])
@pytest.mark.some_cases(10)
def test_uneven_prompts_in_any_pieces(conv_blocks: tuple[int, ...], taps: int, at_once: int) -> None:
    model = make(conv_blocks, taps)
    engine = Engine(model, tokens_at_once=at_once)
    found = [engine.add(ids, Options(9, logprobs=0)) for ids in prompts_of([5, 1, 2, 70, 13])]
    run(engine)
    check(model, found, 9)
    assert engine.cache.nbytes == 0


@pytest.mark.parametrize("keep", [0, 3])
def test_shared_beginnings(keep: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt copies the state from the end of another one, or from a token after which it was kept."""
    model, (beginning,) = make(), prompts_of([150])
    rows: list[int] = []
    embeddings = GPT.embeddings
    monkeypatch.setattr(GPT, "embeddings", lambda self, ids, at: rows.append(len(ids)) or embeddings(self, ids, at))
    engine = Engine(model, keep=keep)
    found = [engine.add([*beginning, i, 3], Options(4, logprobs=0)) for i in range(3)] + [
        engine.add(beginning, Options(4, logprobs=0)), engine.add(beginning[:100], Options(4, logprobs=0)),
    ]  # fmt: skip
    run(engine)
    monkeypatch.undo()
    check(model, found, 4)
    assert sum(rows) < 152 + 3 * (152 - 128) + (100 - 64) + 5 * 4, "the first 128 tokens were computed once"
    longer = engine.add([*found[0].ids, 7], Options(4, logprobs=0))
    run(engine)
    check(model, [longer], 4)
    engine.close()
    assert engine.cache.nbytes == 0


def test_sequences_that_outgrow_their_slots_and_leave() -> None:
    model = make(n_context=600)
    engine = Engine(model)
    found = [
        engine.add(ids, Options(n, logprobs=0)) for ids, n in zip(prompts_of([250, 3, 255]), (20, 60, 3), strict=True)
    ]
    for _ in range(5):
        engine.step()
    engine.cancel(found[1])
    found.append(engine.add(prompts_of([40])[0], Options(5, logprobs=0)))
    run(engine)
    check(model, found)
    assert engine.cache.nbytes == 0


def test_a_context_that_slides_begins_again() -> None:
    model = make(n_context=16)
    engine = Engine(model)
    found = engine.add(prompts_of([10])[0], Options(30, context_full="slide"))
    plain = Engine(model, cache=False)
    expected = plain.add(found.prompt, Options(30, context_full="slide"))
    run(engine)
    run(plain)
    assert found.new == expected.new and len(found.new) == 30


def test_a_pass_that_fails_changes_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first convolution has seen the tokens when a later block raises; the step can be repeated."""
    model = make()
    engine = Engine(model)
    found = [engine.add(ids, Options(9, logprobs=0)) for ids in prompts_of([5, 66])]
    engine.step()
    right: Callable[..., object] = BlockCache.attend

    def interrupted(*given: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr(BlockCache, "attend", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    monkeypatch.setattr(BlockCache, "attend", right)
    run(engine)
    check(model, found, 9)


@pytest.mark.parametrize("broken", ["no state", "the state of the first block", "the state of another sequence"])
def test_a_wrong_state_is_seen(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparisons above can fail."""
    right = ConvState.extend

    def wrong(self: ConvState, i: int, old: int, z: torch.Tensor) -> torch.Tensor:
        if broken == "no state":
            self.now.zero_()
        elif broken == "the state of the first block":
            self.now[i] = self.now[0]
        else:
            self.now, shared[0] = shared[0], self.now
        return right(self, i, old, z)

    model = make((0, 1))
    shared = [torch.zeros(2, 2, 16, dtype=torch.float64)]
    monkeypatch.setattr(ConvState, "extend", wrong)
    engine = Engine(model)
    found = [engine.add(ids, Options(9, logprobs=0)) for ids in prompts_of([5, 8])]
    run(engine)
    with pytest.raises(AssertionError):
        check(model, found)


def test_states_are_kept_after_every_stride() -> None:
    z, taps = torch.randn(3 * conv_state.STRIDE + 5, 4), 4
    state, done = ConvState(z, (1, taps - 1, 4)), 0
    for count in (1, 2, conv_state.STRIDE, 1, 2 * conv_state.STRIDE, 1):
        rows = state.extend(0, done, z[done : done + count])
        assert torch.equal(rows[taps - 1 :], z[done : done + count])
        state.finish()
        done += count
    assert done == len(z) and list(state.kept) == [conv_state.STRIDE * i for i in (1, 2, 3)]
    for stop, kept in [*state.kept.items(), (done, state.now)]:
        assert torch.equal(kept[0], z[stop - taps + 1 : stop])
        assert torch.equal(state.cut(stop, done).now[0], z[stop - taps + 1 : stop])
    cut = state.cut(2 * conv_state.STRIDE, done)
    assert list(cut.kept) == [conv_state.STRIDE, 2 * conv_state.STRIDE]
