"""`handgrad chat`"""

import json
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ..errors import HandgradError, for_command_line
from ..files.reading import JSON_BYTES, MB, decode
from . import console
from .generate import (
    BITS,
    MIN_P,
    PENALTY,
    PRECISION,
    TEMPERATURE,
    TOKENS,
    TOP_K,
    TOP_P,
    note_precision,
    sampling,
    text,
    use_fastest_threads,
)

if TYPE_CHECKING:
    from ..inference.conversation import Chat

MODEL = text(
    "A chat model: one of `handgrad get`, a model directory, a GGUF file, an adapter, a run folder (its best checkpoint), or"
    " a name on the hub."
)
SYSTEM = text("System prompt. [default: that of the model's chat template]")
SEED = sampling("Seed of the samples; turn i has SEED + i. [default: random]", min=0)

HELP = """\
/why [WORD]      the words that the last answer, or one word of it, depended on
/reset           forget the conversation
/system TEXT     another system prompt; without TEXT: show it
/temp X          another temperature; 0 always takes the most probable token
/adapter DIR     use an adapter of this model
/base            use the model without an adapter
/save FILE       write the conversation, in the format that finetune reads
/help            these commands
/exit            leave; so does Ctrl-D

Ctrl-C stops an answer. A line that begins with a space is a message, whatever follows."""


def chat(
    model: Annotated[str, MODEL] = "smollm2",
    system: Annotated[str | None, SYSTEM] = None,
    max_new_tokens: Annotated[int, TOKENS] = 512,
    temperature: Annotated[float, TEMPERATURE] = 0.2,
    top_k: Annotated[int | None, TOP_K] = None,
    top_p: Annotated[float | None, TOP_P] = 0.9,
    min_p: Annotated[float | None, MIN_P] = None,
    repetition_penalty: Annotated[float, PENALTY] = 1.0,
    seed: Annotated[int | None, SEED] = None,
    bits: Annotated[int | None, BITS] = None,
    precision: Annotated[str | None, PRECISION] = None,
) -> None:
    """Chat with a model in the terminal; /help lists the commands, such as /why and /adapter.

    The model's own chat template is used. Without a terminal, each line of standard input is a message or a command, and the
    answers are printed.

      handgrad chat
      handgrad chat --system "Answer in one sentence." --temperature 0
      handgrad chat --model path/to/chat-model --max-new-tokens 100 --seed 1 --bits 8
      echo "Name three colors." | handgrad chat
    """
    from ..inference.sampling import Sampling

    how = Sampling(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    note_precision(precision)
    session = Session(_open(model, system, max_new_tokens, how, bits, precision), interactive)
    if interactive:
        size = session.chat.model.size
        console.note(
            f"{model}: {size / 1e6:,.0f} million parameters, context of {session.chat.model.config.n_context:,} tokens."
            " /help lists commands; Ctrl-D leaves."
        )
    for line in _lines(interactive):
        try:
            if not session.take(line):
                break
        except KeyboardInterrupt:  # outside of an answer: during a command
            if not interactive:
                raise
            sys.stdout.write("\n")
            console.note("Stopped.")
        except (HandgradError, OSError) as mistake:
            if not interactive:
                raise
            console.err.print(for_command_line(mistake), style="red", highlight=False, soft_wrap=True, markup=False)


def _open(
    name: str, system: str | None, max_new_tokens: int, how: Any, bits: int | None, precision: str | None
) -> "Chat":
    """Load the model; an adapter goes onto its base, so that it can be taken off again."""
    from ..formats.models import base_of, chat_template_of, open_to_generate, tokenizer_folder, weights_folder
    from ..inference.conversation import Chat
    from ..lora import is_adapter
    from ..text import downloads

    if name in downloads.DOWNLOADS and not downloads.is_cached(name):
        console.note(f"fetching {downloads.DOWNLOADS[name].description} …")
    folder = weights_folder(name)
    base = base_of(folder) if is_adapter(folder) else folder
    template = chat_template_of(folder)
    if template is None:
        raise HandgradError(
            f"{folder} has no chat template, so it is no chat model: continue a text with handgrad generate --prompt"
        )
    network = open_to_generate(base, bits, precision)
    use_fastest_threads(network)
    if base is not folder:
        network.text_source = str((tokenizer_folder(folder) or base).absolute())
    made = Chat(network, chat_template_of(base) or template, system=system, sampling=how, max_new_tokens=max_new_tokens)
    if base is not folder:
        made.attach(folder, template)
    return made


def _lines(interactive: bool) -> Iterator[str]:
    """The lines that the user writes."""
    if not interactive:
        while raw := sys.stdin.buffer.readline(JSON_BYTES + 1):
            if len(raw) > JSON_BYTES:
                raise HandgradError(f"a line of standard input has more than {JSON_BYTES // MB} MB, the maximum")
            yield decode(raw, "standard input").rstrip("\r\n")
        return
    prompt = "you › "
    try:
        import readline  # noqa: F401  line editing and history for input()

        if console.out.color_system is not None:
            prompt = f"\001\033[1;36m\002{prompt}\001\033[0m\002"  # \001 … \002: without width
    except ImportError:
        pass
    while True:
        try:
            yield input(prompt)
        except EOFError:
            sys.stdout.write("\n")
            return
        except KeyboardInterrupt:
            sys.stdout.write("\n")
            console.note("Ctrl-D or /exit leaves.")


@contextmanager
def _interruptible() -> Iterator[threading.Event]:
    """Within the context Ctrl-C sets the event instead of raising, so that no step of the engine is cut off."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed  # only the main thread can handle signals
        return
    before = signal.signal(signal.SIGINT, lambda *_: pressed.set())
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)


class Session:
    """Carries out what the user writes."""

    def __init__(self, chat: "Chat", interactive: bool):
        self.chat, self.interactive = chat, interactive

    def take(self, line: str) -> bool:
        """A message or a command. Returns False if the user leaves."""
        if not line.startswith("/"):
            if line.strip():
                self.answer(line.strip())
            return True
        name, _, argument = line[1:].partition(" ")
        if name in ("exit", "quit"):
            return False
        commands = ("help", "reset", "system", "temp", "adapter", "base", "save", "why")
        if name not in commands:
            raise HandgradError(f"there is no command /{name}: /help lists them; a message may begin with a space")
        getattr(self, name)(argument.strip())
        return True

    def answer(self, message: str) -> None:
        from ..display.chat_output import Wrapped

        out = Wrapped(console.out.width - 1 if self.interactive else None)
        before = self.chat.last
        with _interruptible() as pressed:
            pieces = self.chat.ask(message)
            if self.chat.dropped:
                turns = "turn" if self.chat.dropped == 1 else f"{self.chat.dropped} turns"
                console.note(f"The context is full: the oldest {turns} dropped.")
            for piece in pieces:
                out.write(piece)
                if pressed.is_set():
                    break
            pieces.close()
        out.end()
        answered = self.chat.last is not before
        finish = self.chat.last.finish if self.chat.last is not None and answered else None
        if pressed.is_set():
            console.note("Stopped.")
        elif finish == "length":
            console.note(
                f"The answer was cut off at {self.chat.max_new_tokens} tokens: --max-new-tokens sets their number."
            )
        elif finish == "context":
            console.note(f"The answer was cut off: the context of {self.chat.model.config.n_context:,} tokens is full.")
        elif not answered:
            console.note("The answer is empty; the message was not added to the conversation.")
        if self.interactive:
            sys.stdout.write("\n")

    # ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────

    def help(self, _: str) -> None:
        console.say(HELP)

    def reset(self, _: str) -> None:
        self.chat.reset()
        console.note("The conversation is forgotten.")

    def system(self, prompt: str) -> None:
        if prompt:
            self.chat.system = prompt
            console.note("The system prompt applies from the next answer on.")
        else:
            console.say(self.chat.system or "No system prompt was given; the chat template may add its own.")

    def temp(self, value: str) -> None:
        try:
            number = float(value)
        except ValueError:
            raise HandgradError(f"/temp needs a number, such as /temp 0.7, not {value!r}") from None
        self.chat.sampling = replace(self.chat.sampling, temperature=number)
        console.note(f"temperature {number:g}")

    def adapter(self, given: str) -> None:
        from ..formats.models import chat_template_with, locate
        from ..lora import is_adapter

        folder = locate(_path(given, "/adapter runs/mine"))
        if not is_adapter(folder):
            raise HandgradError(f"{folder} is not an adapter: it has no adapter_config.json")
        chat = self.chat
        chat.attach(folder, chat_template_with(folder, chat.text.tokenizer))
        assert chat.attachment is not None
        console.note(f"adapter {folder}, in {len(chat.attachment.layers)} layers")

    def base(self, _: str) -> None:
        had = self.chat.attachment
        self.chat.detach()
        console.note("No adapter is in use." if had is None else f"The adapter {had.folder} is off.")

    def save(self, given: str) -> None:
        from ..files.atomic import check_writable, write_text

        path = _path(given, "/save talk.jsonl")
        if not self.chat.messages:
            raise HandgradError("there is nothing to save yet: ask something first")
        if os.path.lexists(path):
            raise HandgradError(f"{path} exists: choose another name")
        check_writable(path)
        write_text(path, json.dumps({"messages": self.chat.conversation}, ensure_ascii=False) + "\n")
        console.note(f"wrote {len(self.chat.conversation)} messages to {path}")

    def why(self, word: str) -> None:
        from ..display.chat_output import explanation

        console.out.print(explanation(self.chat.why(word or None), bool(word)))


def _path(given: str, example: str) -> Path:
    """The path after a command; quotes as in a shell are removed."""
    try:
        words = shlex.split(given)
    except ValueError:
        words = [given]
    if not words:
        raise HandgradError(f"which one? Write for example {example}")
    return Path(words[0] if len(words) == 1 else given).expanduser()
