"""The sandbox process: limits, restarts, forks, threads, and its exit."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from handgrad.errors import HandgradError
from handgrad.lora.config import LoRAConfig
from handgrad.lora.patterns import matches, prepare_matches
from handgrad.sandbox import client
from handgrad.text.chat_template import ChatTemplate

NAMES = ["transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_proj", "lm_head"]
EVIL = r"(([\w.]+)+)+!"
TALK = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


def child() -> int:
    assert client._service.child is not None
    return client._service.child._process.pid


def has_exited(pid: int) -> bool:
    """Whether the process has ended; zombies count as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def becomes_true(condition: Callable[[], bool]) -> bool:
    """Whether the condition holds within 20 seconds."""
    for _ in range(400):
        if condition():
            return True
        time.sleep(0.05)
    return False


def test_patterns_match_complete_names_and_parts_after_a_dot() -> None:
    for pattern, expected in {
        "c_attn": [True, False, False], "attn.c_attn": [True, False, False], "h.0.attn.c_attn": [True, False, False],
        "attn": [False] * 3, "c.attn": [True, False, False], "ttn.c_attn": [False] * 3, "lm_head": [False, False, True],
        r".*\.(c_attn|c_proj)": [True, True, False], r"h\.[1-9]\..*": [False, True, False], "^lm.*": [False, False, True],
        "": [False] * 3,
    }.items():  # fmt: skip
        assert [matches(pattern, name) for name in NAMES] == expected, pattern


def test_plain_names_start_no_child() -> None:
    client._service.stop()
    LoRAConfig(rank_pattern={"mlp.c_proj": 4, "transformer.h.0.attn.c_attn": 2}, targets=("c_attn", "all-linear"))
    assert matches("mlp.c_proj", NAMES[1])
    assert client._service.child is None


def test_matches_are_cached(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_matches(["x+once", "y+once"], NAMES)
    monkeypatch.setattr(client, "call", lambda *_, **__: pytest.fail("called again"))
    assert not any(matches(pattern, name) for pattern in ("x+once", "y+once") for name in NAMES)


def test_a_request_after_an_exceeded_limit_succeeds() -> None:
    template = ChatTemplate("{{ messages[0].content * (10**9 if messages|length > 2 else 1) }}", name="t.jinja")
    assert template.render(TALK) == "Why?"
    first = child()
    with pytest.raises(HandgradError, match=r"the regular expression .* takes too long"):
        client.match([EVIL], NAMES)
    with pytest.raises(HandgradError, match=r"t\.jinja needs more than 200 MB"):
        template.render([*TALK, *TALK])
    assert template.render(TALK) == "Why?"  # the new child compiles it again
    assert child() != first and has_exited(first)


def test_a_killed_child_is_replaced() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    os.kill(child(), signal.SIGKILL)
    assert template.render(TALK) == "Why?"


def test_a_forked_process_starts_another_child() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    before = child()
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        os.write(writing, f"{template.render(TALK)} {child()}".encode())
        client._service.stop()
        os._exit(0)
    os.waitpid(process, 0)
    text, other = os.read(reading, 100).decode().split()
    os.close(reading)
    os.close(writing)
    assert text == "Why?" and int(other) != before
    assert template.render(TALK) == "Why?" and child() == before, "the fork must not disturb it"


def test_threads_share_the_child() -> None:
    template = ChatTemplate("{{ messages[0].content }}")

    def render_all(n: int) -> list[str]:
        return [template.render([{"role": "user", "content": f"{n}.{i}"}]) for i in range(50)]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(render_all, range(4))) == [[f"{n}.{i}" for i in range(50)] for n in range(4)]


@pytest.mark.parametrize(
    "end", ["", "os.kill(os.getpid(), 9)", "os._exit(0)", "os.fork() or time.sleep(60)\nos._exit(0)"]
)
def test_the_child_exits_with_its_parent(end: str) -> None:
    """Also if the parent is killed, or if a fork of it keeps the pipe open."""
    code = (
        "import os, time\nfrom handgrad.sandbox import client\nclient.match(['a+'], ['a'])\n"
        f"print(client._service.child._process.pid, flush=True)\n{end}\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.stdout.close()
    process.wait()
    try:
        assert becomes_true(lambda: has_exited(pid))
    finally:
        if "fork" in end:
            os.killpg(process.pid, signal.SIGKILL)


def test_the_child_ignores_ctrl_c() -> None:
    template = ChatTemplate("{{ messages[0].content }}")
    before = child()
    os.kill(before, signal.SIGINT)
    assert template.render(TALK) == "Why?" and child() == before


def test_any_text_survives_the_round_trip() -> None:
    text = "naïve 東京 🙂 \ud83d \x00 \u2028" * 50_000
    assert ChatTemplate("{{ messages[0].content }}").render([{"role": "user", "content": text}]) == text


def test_the_child_imports_neither_torch_nor_handgrad() -> None:
    worker = Path(client.worker.__file__)
    code = f"import sys; sys.path.append({str(worker.parent)!r}); import worker; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True).stdout
    assert not {"torch", "handgrad", "numpy"} & set(loaded.split())
