"""Log-likelihoods as lm-eval asks for them, equal to those of transformers. `make lm-eval-check` runs lm-eval itself."""

import shutil
import sys
from pathlib import Path

import pytest
from tiny_server import open_tiny, post, write_models

import lm_eval_check
from handgrad.serve.routes import Server


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("models"))


def test_the_requests_of_local_completions(folder: Path) -> None:
    """All answers of a question in one request: ids, one more token, and the log-probabilities of the prompt."""
    answers = []
    with (made := Server(open_tiny(folder))):
        for question in lm_eval_check.questions():
            context = lm_eval_check.context_of(question)
            prompts = [list(f"{context} {choice}".encode()) for choice in question["choices"]]
            asked = {"model": "base", "prompt": prompts, "max_tokens": 1, "logprobs": 1, "echo": True}
            status, found = post(made, "/v1/completions", {**asked, "temperature": 0, "seed": 1234})
            assert status == 200, found
            before = len(context.encode())
            answers.append([sum(x["logprobs"]["token_logprobs"][before:-1]) for x in found["choices"]])
    found, expected = lm_eval_check.scores_of(answers), lm_eval_check.by_transformers(folder / "base")
    assert lm_eval_check.difference(found, expected) < lm_eval_check.LIMIT
    assert (found.acc, found.acc_norm) == (expected.acc, expected.acc_norm)
    shifted = lm_eval_check.scores_of([x[1:] + x[:1] for x in answers])
    assert lm_eval_check.difference(shifted, expected) > 1e-2, "the test can fail"


def test_lm_eval(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = shutil.which("lm_eval")
    if program is None:
        with capsys.disabled():
            sys.stderr.write("\nlm-eval is not on PATH: its test is SKIPPED; make lm-eval-check installs and runs it\n")
        pytest.skip("lm-eval is not on PATH: make lm-eval-check installs and runs it")
    assert lm_eval_check.check(Path(program), str(folder / "base"), tmp_path)
