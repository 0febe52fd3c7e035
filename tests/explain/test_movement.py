"""Playing the pass, its file, and what is linked, in a real browser."""

import base64
import re
from pathlib import Path

import pytest
from page_helpers import Open, check_accessibility, exported, go
from playwright.sync_api import Page, expect
from tiny_session import TEXT

from handgrad.explain_page.session.session import Session
from handgrad.formatting import typeset

pytest_plugins = ["page_fixtures"]

# Chromium decodes the file: how many frames and seconds; of some frames the pixels, or how many have these colors
DECODE = """async ([data, wanted, colors]) => {
  const bytes = Uint8Array.from(atob(data), (c) => c.charCodeAt(0));
  const decoder = new ImageDecoder({ data: bytes, type: "image/gif" });
  await decoder.tracks.ready;
  await decoder.completed;
  const { frameCount, repetitionCount } = decoder.tracks.selectedTrack;
  let seconds = 0;
  const pixels = [];
  const counted = ({ data }) => {
    const found = new Map();
    for (const pixel of new Uint32Array(data.buffer)) found.set(pixel, (found.get(pixel) ?? 0) + 1);
    return colors.map(([r, g, b]) => found.get((0xff000000 | (b << 16) | (g << 8) | r) >>> 0) ?? 0);
  };
  for (let frameIndex = 0; frameIndex < frameCount; frameIndex++) {
    const { image } = await decoder.decode({ frameIndex });
    seconds += image.duration / 1e6;
    if (wanted.includes(frameIndex)) {
      const canvas = new OffscreenCanvas(image.displayWidth, image.displayHeight), context = canvas.getContext("2d");
      context.drawImage(image, 0, 0);
      const shown = context.getImageData(0, 0, canvas.width, canvas.height);
      pixels.push(colors ? counted(shown) : [...shown.data]);
    }
    image.close();
  }
  return { frameCount, seconds, pixels, repeats: repetitionCount > 1e6 };
}"""

# Press “step” until the end: the seconds and the text of every stop
STEP_THROUGH = """() => {
  const stops = [], picture = document.querySelector("#play-picture");
  for (let before = ""; before !== picture.dataset.seconds; ) {
    before = picture.dataset.seconds;
    document.querySelector("#play-step").click();
    if (before !== picture.dataset.seconds)
      stops.push([picture.dataset.seconds, document.querySelector("#play-text").textContent]);
  }
  return stops;
}"""

# Frames of noise in 200 colors and an unchanged one: the table of codes is full several times
ENCODE = """async () => {
  const { gifOf, paletteOf } = await import("/assets/gif.js");
  let seed = 1;
  const random = (n) => ((seed = (seed * 48271) % 2147483647) >> 8) % n;
  const colors = Array.from({ length: 200 }, (_, i) => (0xff000000 | (i * 0x010305)) >>> 0);
  const noise = () => Uint32Array.from({ length: 70 * 90 }, () => colors[random(200)]);
  const first = noise(), second = first.slice();
  for (let i = 700; i < 2000; i++) second[i] = colors[random(200)];
  const frames = [first, second, second.slice(), noise()];
  const gif = gifOf(70, 90, paletteOf(frames));
  for (const frame of frames) gif.add(frame, 7);
  let text = "";
  for (const byte of gif.bytes()) text += String.fromCharCode(byte);
  return [btoa(text), frames.map((frame) => [...new Uint8Array(frame.buffer)])];
}"""


def seconds(page: Page) -> float:
    return float(page.locator("#play-picture").get_attribute("data-seconds") or "")


def test_the_pass_is_stepped_through_and_saved(open_page: Open, session: Session, tmp_path: Path) -> None:
    page = open_page("#/station/blocks.1.a_3/backward")  # with reduced motion
    page.click("#play-pass")
    expect(page.locator("#play-picture")).to_have_attribute("data-seconds", "0.000")
    expect(page.locator("#map")).to_be_hidden()
    expect(page.locator("#play-go")).to_have_text("start again")  # nothing moves by itself
    expect(page.locator("#play-block")).to_have_value("1")  # the block of the station
    trace, n = session.sentence(TEXT).trace, len(TEXT)
    stops = page.evaluate(STEP_THROUGH)
    times, texts = [float(stop[0]) for stop in stops], [stop[1] for stop in stops]
    assert times == sorted(set(times)) and len(times) == 2 * (len(session.stations) - 9 + 2) - 1
    norms = {name: typeset(trace[name].double().norm().item()) for name in trace if trace[name].ndim == 2}
    heads = trace["blocks.1.a_3"].view(n, 3, 8).norm(dim=(0, 2)).double()
    errors = trace["blocks.1.delta_3"].view(n, 3, 8).norm(dim=(0, 2)).double()
    for expected in (
        f"Block 1: it leaves with length {norms['blocks.0.a_10']}.",
        f"a₃  Attention: length {norms['blocks.1.a_3']}. 3 heads side by side; the longest output is that of head"
        f" {int(heads.argmax()) + 1}, {typeset(heads.max().item())}.",
        f"a₅  Skip connection: what it joins has lengths {norms['blocks.0.a_10']} and {norms['blocks.1.a_4']}; the result"
        f" has length {norms['blocks.1.a_5']}.",
        f"the mean loss of the sentence: {typeset(trace.loss)}. Here the backward pass begins.",
        f"a₃  Attention: an error of length {norms['blocks.1.delta_3']} arrives. Of 3 heads, head"
        f" {int(errors.argmax()) + 1} receives most, {typeset(errors.max().item())}.",
        f"a₅  Skip connection: the error, length {norms['blocks.1.delta_5']}, goes two ways, into the branch and past it.",
        "What went two ways comes back two ways, and is added: length"
        f" {typeset(trace['blocks.0.delta_10'].double().norm().item())} leaves Block 2.",
        "The backward pass is complete: every layer has its gradient.",
    ):
        assert " ".join(expected.split()) in [" ".join(text.split()) for text in texts], (expected, texts)
    page.click("#play-back")
    assert seconds(page) == times[-2]
    check_accessibility(page)
    with page.expect_download() as saved:
        page.click("#play-save")
    assert saved.value.suggested_filename == "small-pass.gif"
    file = tmp_path / "pass.gif"
    saved.value.save_as(file)
    data = base64.b64encode(file.read_bytes()).decode()
    white, orange, blue = (255, 255, 255), (224, 139, 62), (91, 155, 220)  # --card, --forward-line, --backward-line
    found = page.evaluate(DECODE, [data, [0, 50, 100], [white, orange, blue]])
    assert found["frameCount"] == 101 and found["seconds"] == pytest.approx(12) and found["repeats"]
    first, turn, last = found["pixels"]
    assert min(first[0], turn[0], last[0]) > 10_000  # flat colors are exact
    assert turn[1] > 5 * first[1] and turn[1] == pytest.approx(
        last[1], rel=0.2
    )  # the forward pass lights the orange lines
    assert last[2] > 5 * turn[2]  # the backward pass the blue ones
    page.click("#play-close")
    expect(page.locator("#map")).to_be_visible()
    expect(page.locator("#play-pass")).to_be_focused()
    data, frames = page.evaluate(ENCODE)
    found = page.evaluate(DECODE, [data, [0, 1, 2, 3]])
    assert found["frameCount"] == 4 and found["pixels"] == frames  # no pixel is lost


def test_the_pass_moves_on_a_phone_and_in_a_file(open_page: Open, session: Session, tmp_path: Path) -> None:
    file = exported(session, tmp_path)
    page = open_page(
        base=file, viewport={"width": 320, "height": 700}, reduced_motion="no-preference", color_scheme="dark"
    )
    page.click("#story-play")
    expect(page.locator("#play-go")).to_have_text("pause")
    expect(page.locator("#play-picture")).to_have_attribute("data-seconds", re.compile(r"^0\.[3-9]|^[1-9]"))
    page.click("#play-go")
    expect(page.locator("#play-go")).to_have_text("play")
    stopped = seconds(page)
    page.select_option("#play-block", "1")
    assert seconds(page) == 0 < stopped
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    assert "story-line" in page.content() and page.locator(".story-next").first.inner_text().startswith(
        "next: the loss of"
    )


def lit(page: Page) -> list[str]:
    """The labels of the elements that are lit."""
    found: list[str] = page.evaluate(
        """[...document.querySelectorAll("[data-link]")].filter((node) => node.checkVisibility() &&
        getComputedStyle(node).boxShadow !== "none").map((node) => node.getAttribute("aria-label") ?? node.innerText)"""
    )
    return found


def marked(page: Page, name: str) -> list[int]:
    """The rows of a matrix around which its canvas has the color of the focus."""
    found: list[int] = page.evaluate(
        """(name) => {
          const canvas = document.querySelector(`canvas[data-name="${name}"]`), { left, top, cellHeight } = canvas.dataset;
          const ratio = devicePixelRatio, x = Math.floor((left - 1) * ratio); // outside the cells
          const copy = new OffscreenCanvas(1, canvas.height), context = copy.getContext("2d", { willReadFrequently: true });
          context.drawImage(canvas, -x, 0);
          const { data } = context.getImageData(0, 0, 1, canvas.height);
          const rows = [];
          for (let row = 0; Number(top) + (row + 1) * cellHeight < canvas.height / ratio + 1; row++) {
            const y = 4 * Math.round((Number(top) + (row + 0.5) * cellHeight) * ratio);
            if (data[y] === 109 && data[y + 1] === 79 && data[y + 2] === 208) rows.push(row);
          }
          return rows;
        }""",
        name,
    )
    return found


def test_what_is_pointed_at_is_lit_everywhere(open_page: Open, session: Session) -> None:
    page = open_page("#/station/blocks.1.a_3/backward")
    trace = session.sentence(TEXT).trace
    expect(page.locator("#badge")).to_have_class("badge good")
    page.hover("#tokens [data-token='5']")
    expect(page.locator("html")).to_have_attribute("data-lit", "token-5")
    expect(page.locator(".map-note")).to_have_text("Numbers and arrows: ‖a‖ and ‖Δ‖ of ‘,’ (position 6) alone.")
    alone = typeset(float(f"{trace['blocks.1.a_5'][5].norm().item():.2g}"))
    expect(page.locator('[data-key="blocks.1.a_5"] .num.forward')).to_have_text(alone)
    for name in ("blocks.1.a_3", "blocks.1.delta_3", "blocks.1.rho", "blocks.1.delta_raw"):
        assert marked(page, name) == [5], name
    page.hover("[data-head-button='2']")
    expect(page.locator(".map-note")).to_contain_text("over all tokens")
    assert lit(page) == [
        "a₃ Attention, block 2, verified",
        page.locator("[data-head-button='2']").get_attribute("aria-label"),
    ]
    assert marked(page, "blocks.1.a_3") == []
    # a cell lights its token, its feature and its head
    page.locator('canvas[data-name="blocks.1.a_3"]').scroll_into_view_if_needed()
    canvas = page.locator('canvas[data-name="blocks.1.a_3"]')
    left, top, width, height = (
        float(canvas.get_attribute(f"data-{x}") or "") for x in ("left", "top", "cell-width", "cell-height")
    )
    canvas.hover(position={"x": left + 10.5 * width, "y": top + 4.5 * height})
    expect(page.locator("html")).to_have_attribute("data-lit", "token-4 feature-mixed-1-10 head-1-1 space-mixed-1")
    assert marked(page, "blocks.1.delta_3") == [4]
    assert len(lit(page)) == 3 and lit(page)[0].startswith("token 5: ‘e’")  # in the strip, in the map, among the heads
    page.mouse.move(1, 1)
    assert page.get_attribute("html", "data-lit") == "" and lit(page) == []
    # by keyboard, and in the terms of a number
    page.locator("#tokens [aria-pressed=true]").focus()
    page.keyboard.press("Home")
    expect(page.locator("html")).to_have_attribute("data-lit", "token-0")
    go(page, "station/blocks.1.a_7/backward")
    page.locator('canvas[data-name="blocks.1.grad_w_6"]').click(position={"x": 90, "y": 40})
    place = page.locator("#follow .place").first
    place.hover()
    t = int((place.get_attribute("data-link") or "").removeprefix("token-"))
    assert place.inner_text().endswith(f"(position {t + 1})")
    assert any(label.startswith(f"token {t + 1}: ") for label in lit(page))
    go(page, "heads")
    page.hover("[data-head='0.1']")
    assert [label.split(":")[0] for label in lit(page)] == ["Block 1, verified, unfold", "Head 2 of block 1"]
    check_accessibility(page)
