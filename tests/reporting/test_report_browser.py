"""The report in a real browser: nothing is fetched, nothing complains, the slider and the pointer do what they promise, in every look."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser as browsers
import made_results
import pytest
from browser import Browser
from test_report_page import HOSTILE, hostile

import fewbits

SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"
FILLS = "[...document.querySelectorAll('[data-chart=\"map\"] .cells rect')].map((cell) => cell.getAttribute('fill'))"
TIP = "[...document.querySelectorAll('[data-chart=\"%s\"] g[aria-label=\"tip\"] text')].map((tip) => tip.textContent).join(' ')"
# of every piece of text on the screen: its colour over the nearest ground behind it, by the formula of WCAG
CONTRASTS = """(() => {
  const parts = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (part) => (part / 255 <= 0.03928 ? part / 255 / 12.92 : ((part / 255 + 0.055) / 1.055) ** 2.4);
  const light = (colour) => parts(colour).slice(0, 3).map(linear).reduce((sum, part, i) => sum + part * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (parts(colour)[3] !== 0) return colour;
    }
    return "rgb(255, 255, 255)";
  };
  const found = {};
  for (const element of document.querySelectorAll("main *, footer *, #theme")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!own || element.closest("svg") || !element.checkVisibility()) continue;
    const [a, b] = [light(getComputedStyle(element).color), light(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const name = element.tagName + "." + element.className;
    found[name] = Math.min(found[name] ?? 99, ratio);
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = browsers.find()
    if program is None:
        how = "no chromium is here: `apt-get install chromium`, or put any Chromium on the path"
        if os.environ.get("FEWBITS_NEEDS_BROWSER") == "1":
            pytest.fail(how)
        pytest.skip(how)
    with Browser(program) as found:
        yield found


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    bench = tmp_path_factory.mktemp("bench") / "results.json"
    bench.write_text(json.dumps(made_results.kernel_bench()))
    return written(made_results.results(), tmp_path_factory.mktemp("page"), bench)


def written(results: Any, folder: Path, *bench: Path) -> Path:
    (folder / "results.json").write_text(json.dumps(results))
    return fewbits.report(folder, folder / "report.html", bench=bench)


@pytest.mark.parametrize("width", [1280, 375])
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_every_look_is_whole(browser: Browser, page: Path, width: int, theme: str) -> None:
    """No complaint, no request but for the page itself, nothing wider than the screen, text that can be read. And a picture to look at."""
    browser.open(page, width, dark=theme == "dark", phone=width < 500)
    assert browser.complaints() == []
    assert [request["url"] for request in browser.requests()] == [page.as_uri()]
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    missing = "[...document.querySelectorAll('[data-chart]')].filter((place) => !place.querySelector('svg, .missing')).length"
    assert browser.evaluate(missing) == 0
    contrasts = browser.evaluate(CONTRASTS)
    assert len(contrasts) > 15 and {name: ratio for name, ratio in contrasts.items() if ratio < 4.5} == {}
    browser.screenshot(SCREENSHOTS / f"report-{'phone' if width < 500 else 'desktop'}-{theme}.png")


def test_the_slider_moves_the_plan(browser: Browser, page: Path) -> None:
    """By the keyboard: the figures say another plan, and as many cells of the map are marked as changed as the plan has other formats."""
    results = made_results.results()
    browser.open(page, 1280)
    before, said = browser.evaluate(FILLS), browser.evaluate("document.getElementById('stop').textContent")
    assert "This file." in said and len(before) == len(results["plan"]["weights"])
    browser.evaluate("document.getElementById('size').focus()")
    browser.press("ArrowRight", 39)
    browser.press("ArrowRight", 39)
    after, moved = browser.evaluate(FILLS), browser.evaluate("document.getElementById('stop').textContent")
    assert after != before and moved != said
    larger = [point for point in results["frontier_plans"]["points"] if point["bytes"] > results["plan"]["bytes"]][1]
    assert f"{larger['bytes'] / 1e6:.2f} MB" in moved
    assert browser.evaluate("document.getElementById('size').getAttribute('aria-valuetext')") == moved
    beside = results["verdict"]["bytes"] - results["plan"]["bytes"]
    assert browser.evaluate("document.getElementById('command').textContent").endswith(f"--size {larger['bytes'] + beside}")
    marked = browser.evaluate('document.querySelectorAll(\'[data-chart="map"] g[stroke="currentColor"][aria-label="cell"] rect\').length')
    assert f"{marked} weights in another format" in moved
    browser.evaluate("document.getElementById('mine').click()")
    browser.settle()
    assert browser.evaluate(FILLS) == before and browser.evaluate("document.getElementById('stop').textContent") == said
    assert browser.complaints() == []


def test_hover_shows_figures(browser: Browser, page: Path) -> None:
    results = made_results.results()
    names = list(results["plan"]["weights"])
    browser.open(page, 1280)
    for number in (0, 5, 20):
        browser.hover('[data-chart="map"] .cells rect', number)
        told, row = browser.evaluate(TIP % "map"), results["plan"]["weights"][names[number]]
        for part in (names[number], row["format"], f"{8 * row['bytes'] / (row['shape'][0] * row['shape'][1]):.2f} bits per weight"):
            assert part in told
        assert "predicted KL" in told and row["reason"].split("; ")[0] in told
    browser.hover('[data-chart="frontier"] g[aria-label="dot"] circle', 3)
    told = browser.evaluate(TIP % "frontier")
    assert "bits per weight" in told and "KL" in told
    for chart, words in (
        ("growth", "up to"),
        ("costly", "model."),
        ("weights", "% of the values"),
        ("memory", "B"),
    ):
        browser.hover(f'[data-chart="{chart}"] svg')  # its middle
        assert words in browser.evaluate(TIP % chart), chart
    browser.hover('[data-chart="reached"] circle')
    assert "of the limit" in browser.evaluate(TIP % "reached")


def test_another_weight_has_another_histogram(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    drawn = "document.querySelector('[data-chart=\"inputs\"]').innerHTML"
    said = "document.getElementById('input-said').textContent"
    first = browser.evaluate(drawn), browser.evaluate(said)
    assert "not recorded" in first[1]  # the embedding costs most
    other = browser.evaluate("[...document.getElementById('weight').options].findIndex((each) => each.text.includes('down_proj'))")
    browser.evaluate(
        f"(() => {{ const chooser = document.getElementById('weight'); chooser.value = '{other}';"
        " chooser.dispatchEvent(new Event('change')); })()"
    )
    browser.settle()
    assert "-5 to 5 (int8:static, by mse)" in browser.evaluate(said) and "<rect" in browser.evaluate(drawn)


def test_the_theme_can_be_changed_and_paper_is_white(browser: Browser, page: Path) -> None:
    ground = "getComputedStyle(document.body).backgroundColor"
    browser.open(page, 1280)
    light = browser.evaluate(ground)
    browser.evaluate("document.getElementById('theme').click()")
    dark = browser.evaluate(ground)
    assert light != dark
    browser.call("Emulation.setEmulatedMedia", media="print")
    assert browser.evaluate(ground) == "rgb(255, 255, 255)"
    browser.call("Emulation.setEmulatedMedia", media="")
    printed = base64.b64decode(browser.call("Page.printToPDF", preferCSSPageSize=True)["data"])
    assert printed.startswith(b"%PDF") and 1 < printed.count(b"/Type /Page\n") + printed.count(b"/Type /Page ") < 20


def test_a_screen_reader_finds_its_way(browser: Browser, page: Path) -> None:
    browser.open(page, 1280)
    browser.call("Accessibility.enable")
    nodes = [node for node in browser.call("Accessibility.getFullAXTree")["nodes"] if not node.get("ignored")]

    def named(role: str) -> list[str]:
        return [node["name"]["value"] for node in nodes if node["role"]["value"] == role]

    assert len(named("image")) == 11 and all(named("image"))
    assert named("slider") == ["Size of the plan"] and named("combobox") == ["Weight"]
    headings = [(node["properties"], node["name"]["value"]) for node in nodes if node["role"]["value"] == "heading"]
    levels = [next(p["value"]["value"] for p in properties if p["name"] == "level") for properties, _ in headings]
    assert levels == [1] + [2] * (len(levels) - 1) and len(levels) == 11
    assert "main" in {node["role"]["value"] for node in nodes} and named("navigation") == ["Contents"]


def test_names_that_are_code_do_nothing(browser: Browser, tmp_path: Path) -> None:
    results = hostile(made_results.results()) | {"frontier_plans": None}
    browser.open(written(results, tmp_path), 1280)
    assert browser.evaluate("document.hacked") is None and browser.evaluate("document.querySelectorAll('img').length") == 0
    browser.hover('[data-chart="map"] .cells rect', 2)
    assert HOSTILE[: HOSTILE.index(" ")] in browser.evaluate(TIP % "map")
    assert browser.complaints() == [] and len(browser.requests()) == 1


def test_a_demonstration_opens(browser: Browser, tmp_path: Path) -> None:
    page = written(made_results.demonstration(), tmp_path)
    browser.open(page, 1280)
    browser.hover('[data-chart="files"] g[aria-label="dot"] path', 1)
    assert browser.complaints() == [] and "same next token" in browser.evaluate(TIP % "files")
    browser.screenshot(SCREENSHOTS / "report-demo.png")


def test_a_comparison_opens(browser: Browser, tmp_path: Path) -> None:
    browser.open(written(made_results.comparison(), tmp_path), 1280)
    browser.hover('[data-chart="files"] g[aria-label="dot"] path', 1)
    assert browser.complaints() == [] and "same next token" in browser.evaluate(TIP % "files")
    browser.screenshot(SCREENSHOTS / "report-comparison.png")
