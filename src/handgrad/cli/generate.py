"""`handgrad generate`"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import HandgradError
from ..formatting import plural
from . import console

if TYPE_CHECKING:
    from ..inference.engine import TokenLogprob
    from ..inference.text_batch import Batch
    from ..model.gpt import GPT
    from ..text.token_text import TokenText
    from ..text.tokenizer import Tokenizer


def _option(panel: str) -> Callable[..., Any]:
    """An option of this panel: its help text, its flag if it differs from the name, its limits."""
    return lambda text, *flag, **limits: typer.Option(*flag, help=text, rich_help_panel=panel, **limits)


text, sampling, output = _option("Text"), _option("Sampling"), _option("Output")

MODEL = text(
    "A model directory, a GGUF file, an adapter, a run folder (its best checkpoint), one of `handgrad get`, or a"
    " name on the hub."
    " [default: the newest run in runs/]"
)
BITS = text("Bits per weight, 8 or 4: faster, with less memory. [default: the weights as they are]", metavar="N")
PRECISION = text(
    "Precision: float32, or mixed: matrices and operands of products in bfloat16, half the memory. [default: that of the"
    " weights]"
)
PROMPT = text(
    "Prompt, formatted as --format says, or - for standard input; several times for several. [default: continue a line feed]"
)
CHAT = text("The same as --prompt with --format chat: a message to answer.")
FORMAT = text(
    "chat: a prompt is a message in the model's chat template, and the answer is printed; raw: a prompt is continued exactly"
    " as given. [default: as the model was fine-tuned; otherwise chat if it has a chat template]"
)
PROMPTS_FILE = text("A file with one prompt per line, blank lines left out; - for standard input.")
TOKENS = text("Maximum number of tokens to generate.", min=1)
STOP = text("Text at which to end; several times for several.")
STOP_ID = text("Token id at which to end, besides the model's end-of-sequence ids.", metavar="N")
CONTEXT_FULL = text("When the context is full: stop, or slide, which continues from its second half.")
TEMPERATURE = sampling("Sampling temperature; 0 takes the most probable token, 0.8 varies.", min=0)
TOP_K = sampling("Number of most probable tokens to sample from.", min=1)
TOP_P = sampling("Sample from the fewest tokens with this probability.", min=0, max=1)
MIN_P = sampling("Sample from tokens with at least this share of the highest probability.", min=0, max=1)
PENALTY = sampling("Factor by which tokens that occurred get less likely.")
SEED = sampling("Seed of the samples; prompt i has SEED + i. [default: random]", min=0)
JSON = output("One JSON object per prompt and line.", "--json")
LOGPROBS = output(
    "With --json: log-probabilities of the tokens of prompt and answer, and of this many most probable ones.", min=0
)
COST = output(
    "With --bits: measure what it costs on this text file, or on a short built-in passage (sample), instead of generating.",
    metavar="FILE",
)
NO_CACHE = output("Compute everything again for every token: slow, for comparison.", "--no-cache")


def generate(
    model: Annotated[str | None, MODEL] = None,
    prompt: Annotated[list[str] | None, PROMPT] = None,
    chat: Annotated[list[str] | None, CHAT] = None,
    prompts_file: Annotated[Path | None, PROMPTS_FILE] = None,
    format: Annotated[str | None, FORMAT] = None,
    max_new_tokens: Annotated[int, TOKENS] = 200,
    stop: Annotated[list[str] | None, STOP] = None,
    stop_id: Annotated[list[int] | None, STOP_ID] = None,
    context_full: Annotated[str, CONTEXT_FULL] = "stop",
    temperature: Annotated[float, TEMPERATURE] = 0.0,
    top_k: Annotated[int | None, TOP_K] = None,
    top_p: Annotated[float | None, TOP_P] = None,
    min_p: Annotated[float | None, MIN_P] = None,
    repetition_penalty: Annotated[float, PENALTY] = 1.0,
    seed: Annotated[int | None, SEED] = None,
    as_json: Annotated[bool, JSON] = False,
    logprobs: Annotated[int | None, LOGPROBS] = None,
    no_cache: Annotated[bool, NO_CACHE] = False,
    bits: Annotated[int | None, BITS] = None,
    precision: Annotated[str | None, PRECISION] = None,
    cost: Annotated[str | None, COST] = None,
) -> None:
    """Continue prompts, or answer messages, token by token.

    A model with a chat template answers a prompt, any other continues it exactly as given (--format): in bash, $'…' writes
    line feeds and tabs. Generation ends at the end-of-text token, with which chat models end an answer. Several prompts are
    computed together and printed in their order.

      handgrad generate --prompt "ROMEO:" --temperature 0.8
      handgrad generate --model runs/mine --prompt $'Q: why?\\nA:' --stop $'\\n'
      handgrad generate --prompt "ROMEO:" --prompt "JULIET:" --temperature 1 --top-p 0.9 --seed 1
      handgrad generate --prompts-file prompts.txt --json --logprobs 5
      handgrad generate --model smollm2 --prompt "Name three primary colors." --bits 4
      handgrad generate --model smollm2 --prompt "The primary colors are" --format raw
      handgrad generate --model smollm2 --bits 4 --cost sample
    """
    from ..formats.models import open_to_generate, weights_folder
    from ..inference.engine import Engine, Options
    from ..inference.model_text import model_text
    from ..inference.sampling import Sampling
    from ..inference.text_batch import Batch
    from ..text.format import check
    from ..text.token_text import TokenText

    check(format)
    given = [name for name, x in (("prompt", prompt), ("chat", chat), ("prompts-file", prompts_file)) if x]
    if len(given) > 1:
        raise HandgradError(
            "give --prompt, a text to continue, or --chat, a message to answer, or --prompts-file: one of them"
        )
    if chat and format == "raw":
        raise HandgradError("--chat uses the chat template, and --format raw does not: give --prompt with --format raw")
    if format == "chat" and not given:
        raise HandgradError("--format chat needs a message to answer: give --prompt")
    if logprobs is not None and not as_json:
        raise HandgradError("--logprobs needs --json: log-probabilities are printed as JSON")
    if context_full not in ("stop", "slide"):
        raise HandgradError(f"--context-full must be stop or slide, not {context_full!r}")
    if any(not text for text in stop or ()):
        raise HandgradError("--stop is empty: give at least one character")
    folder = weights_folder(model)
    if cost is not None:
        _print_cost(folder, bits, cost)
        return
    asked = chat or (_lines(prompts_file) if prompts_file else _texts(prompt))
    note_precision(precision)
    network = open_to_generate(folder, bits, precision)
    use_fastest_threads(network)
    known = model_text(network)
    if model is None:
        console.note(f"from {folder}")
    prompts, answers = _formatted(folder, known.tokenizer, asked, "chat" if chat else format)
    encoded = [known.tokenizer.encode_prompt(one) for one in prompts]
    if not all(encoded):
        raise HandgradError("the prompt is empty: give at least one character")
    limit = network.config.n_context
    for ids in encoded:
        if len(ids) > limit and context_full == "slide":
            console.note(f"the prompt has {len(ids):,} tokens; the model sees the last {limit:,}")
    full: Literal["stop", "slide"] = "slide" if context_full == "slide" else "stop"
    ends = known.ends | set(stop_id or ())
    options = [
        Options(
            max_new_tokens,
            Sampling(temperature, top_k, top_p, min_p, repetition_penalty, None if seed is None else seed + i),
            frozenset(ends),
            logprobs,
            logprobs is not None,
            full,
        )
        for i in range(len(prompts))
    ]
    batch = Batch(Engine(network, cache=not no_cache), encoded, options, known, stop or ())
    if as_json:
        _write_json(batch, prompts, TokenText(known.tokenizer))
    else:
        _write(batch, [""] * len(prompts) if answers else prompts)
    if any(result.finish == "context" for result in batch.results()):
        console.note(f"the context of {limit:,} tokens is full: --context-full slide continues")


def note_precision(precision: str | None) -> None:
    """Check the precision, and say so if this machine computes in float32 instead."""
    from ..checks import check_choice
    from ..model.precision import without_mixing

    check_choice(precision, None)
    console.note(without_mixing(precision))


def use_fastest_threads(network: "GPT") -> None:
    """On a busy machine, set the number of threads that computes a token fastest."""
    import torch

    from ..machine import is_busy
    from ..plan.thread_count import choose_threads

    if is_busy():
        token, most = torch.zeros(1, 1, dtype=torch.long), torch.get_num_threads()
        number = choose_threads(lambda: network.logits(token, generating=True))
        console.note(f"threads: {number} of {most}, measured, because the machine is busy" if number < most else "")


def _print_cost(folder: Path, bits: int | None, text: str) -> None:
    """Print the change of the loss, and how often the most probable token differs."""
    from ..files.reading import read_text
    from ..formats.models import open_folder
    from ..inference.model_text import model_text
    from ..inference.quantization_loss import PASSAGE, measure_cost

    if bits is None:
        raise HandgradError("--cost compares low-bit weights with the model's own: give --bits 8 or --bits 4 as well")
    passage = PASSAGE if text == "sample" else read_text(Path(text))
    low_bit = open_folder(folder, bits=bits)
    ids = model_text(low_bit).tokenizer.encode_prompt(passage)
    plain = open_folder(folder, "float32")
    sys.stdout.write(f"{bits} bits: {measure_cost(plain, low_bit, ids)}\n")


def _formatted(
    folder: Path, tokenizer: "Tokenizer", asked: list[str] | None, given: str | None
) -> tuple[list[str], bool]:
    """The prompts as the model reads them, and whether they are messages to answer."""
    from ..text.format import choose

    if not asked:
        return ["\n"], False
    how = choose(tokenizer, given)
    how.warn(folder, "generate")
    if how.template is None:
        return asked, False
    if given is None and how.recorded is None:
        console.note("answering through the model's chat template; --format raw continues the text as it is")
    return [how.prompt(one) for one in asked], True


def _texts(prompts: list[str] | None) -> list[str]:
    """The prompts as given; a single dash stands for standard input, without the line feed that echo and files end with."""
    from ..files.reading import read_stdin

    if prompts and prompts.count("-") > 1:
        raise HandgradError(
            "--prompt - reads all of standard input: give it once, or --prompts-file - for a prompt a line"
        )
    return [read_stdin().removesuffix("\n") if one == "-" else one for one in prompts or ()]


def _lines(file: Path) -> list[str]:
    """The lines of a file, or of standard input, that are not blank."""
    from ..files.reading import read_stdin, read_text

    text = read_stdin() if str(file) == "-" else read_text(file)
    lines = text.replace("\r\n", "\n").removesuffix("\n").split("\n")
    found = [line for line in lines if line.strip()]
    if not found:
        raise HandgradError(f"{'standard input' if str(file) == '-' else file} has no prompt: write one per line")
    if len(found) < len(lines):
        console.note(f"{plural(len(lines) - len(found), 'blank line')} of the prompts left out")
    return found


def _write(batch: "Batch", prompts: list[str]) -> None:
    """Print prompts and what follows in their order: the first that has not ended live, later ones when it is their turn."""
    waiting: list[list[str]] = [[prompt] for prompt in prompts]
    ended = [False] * len(prompts)
    turn = 0
    for i, piece in batch:
        waiting[i].append(piece.text)
        ended[i] = piece.finish is not None
        while turn < len(prompts):
            sys.stdout.write("".join(waiting[turn]))
            waiting[turn].clear()
            if not ended[turn]:
                break
            turn += 1
            sys.stdout.write("\n" if turn == len(prompts) else "\n\n")
        sys.stdout.flush()


def _write_json(batch: "Batch", prompts: list[str], tokens: "TokenText") -> None:
    """Print one object per prompt, in their order, as soon as those before it are complete."""
    ended = [False] * len(prompts)
    turn = 0
    for i, piece in batch:
        ended[i] = piece.finish is not None
        while turn < len(prompts) and ended[turn]:
            result = batch.writers[turn].result()
            line: dict[str, Any] = {"prompt": prompts[turn], "text": result.text, "finish": result.finish}
            line |= {"prompt_ids": result.prompt, "ids": result.ids}
            if result.prompt_logprobs or result.logprobs:
                line["prompt_logprobs"] = [_named(x, tokens) for x in result.prompt_logprobs]
                line["logprobs"] = [_named(x, tokens) for x in result.logprobs]
            sys.stdout.write(json.dumps(line, ensure_ascii=False) + "\n")
            sys.stdout.flush()
            turn += 1


def _named(token: "TokenLogprob", tokens: "TokenText") -> dict[str, Any]:
    """A token's log-probability as JSON, with the names of the ids."""
    top = [{"id": i, "token": tokens.name(i), "logprob": logprob} for i, logprob in token.top]
    return {"id": token.id, "token": tokens.name(token.id), "logprob": token.logprob, "top": top}
