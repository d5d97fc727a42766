"""The page of saved rollouts in a real headless Chromium, opened from the disk."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from chromium import CHROMIUM, Browser
from made_rollouts import GROUP, made_table, tool_table
from tiny_models import tiny_params, tiny_tokenizer

from rlhf_core.report.rollouts import main, render_rollouts

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")

HOSTILE = ("<script>window.hacked = true</script>", "<img src=x onerror='window.hacked = true'>", "right \u202eto left", "a nul \0")
STEPS = {1: 40, 5: 40, 9: 40}
ROWS = "[...document.querySelectorAll('.row[role=option]')].map(row => row.innerText)"
VALUES = "[...document.querySelectorAll('.row[role=option] .value')].map(value => Number(value.textContent.replace('−', '-')))"
COUNT = "document.querySelector('#controls output').textContent"
PANES = "[...document.querySelectorAll('.pane h2')].map(head => head.firstChild.textContent)"
READOUT = "document.querySelector('.readout').textContent"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium"), width=1400) as started:
        yield started


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with the page."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "data").mkdir()
    pq.write_table(made_table(tiny_tokenizer(), tiny_params().rl, steps=STEPS, words=30, texts=HOSTILE), folder / "data/rollouts.parquet")
    assert main([str(folder), "--no-open"]) == 0
    return folder


@pytest.fixture
def page(browser: Browser, run: Path) -> Iterator[Browser]:
    """The page, opened anew; a test must leave no error in the console."""
    browser.set_scheme(dark=False)
    open_page(browser, run / "reports/rollouts.html")
    yield browser
    assert browser.evaluate("window.hacked") is None
    assert browser.problems == []


def open_page(browser: Browser, path: Path) -> None:
    browser.problems.clear()
    browser.open(path)
    browser.wait_for("document.body.dataset.ready !== undefined && document.querySelector('.tokens span') !== null")


def choose(page: Browser, **values: str) -> None:
    for name, value in values.items():
        page.evaluate(
            f"(() => {{ const e = document.querySelector('#controls').elements[{name!r}];"
            f" if (e.type === 'checkbox') e.checked = {value!r} !== ''; else e.value = {value!r};"
            " e.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )


def press(page: Browser, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        page.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)


def test_texts_of_models_stay_texts(page):
    assert page.evaluate(COUNT) == "120 of 120"
    assert "right ⟨U+202E⟩to left" in page.evaluate(ROWS)[2] and "a nul ⟨U+0000⟩" in page.evaluate(ROWS)[3]
    assert page.evaluate("document.querySelector('.tokens').textContent") == f"{HOSTILE[0]}<|end|>"
    assert page.evaluate("document.querySelectorAll('main :is(script, img, iframe, object)').length") == 0


def test_filters_by_text_step_score_and_end(page):
    choose(page, text="WINDOW.HACKED")
    assert page.evaluate(COUNT) == "6 of 120"
    choose(page, step="5")
    assert page.evaluate(COUNT) == "2 of 120" and all("step 5" in row for row in page.evaluate(ROWS))
    choose(page, text="the largest of 5003")
    assert page.evaluate(COUNT) == f"{GROUP} of 120"
    choose(page, text="", finished="0")
    assert page.evaluate(COUNT) == "8 of 120" and all("cut off" in row for row in page.evaluate(ROWS))
    choose(page, finished="", **{"from": "20", "to": "60"})
    values = page.evaluate(VALUES)
    assert values and min(values) >= 20 and max(values) <= 60
    choose(page, text="no such text")
    assert page.evaluate(ROWS) == [] and "No rollout matches" in page.evaluate("document.querySelector('#details').innerText")


def test_the_largest_and_the_smallest_come_first(page):
    choose(page, measure="tokens", order="-1")
    values = page.evaluate(VALUES)
    assert values == sorted(values, reverse=True) and values[0] > values[-1]
    choose(page, order="1")
    assert page.evaluate(VALUES) == sorted(page.evaluate(VALUES)) and page.evaluate(VALUES)[0] < values[-1]


def test_a_prompts_rollouts_stand_together_and_those_of_two_steps(page):
    choose(page, step="1", other="9")
    heads = "[...document.querySelectorAll('.row.head')].map(row => row.innerText)"
    assert page.evaluate(COUNT) == "80 of 120" and f"{2 * GROUP} rollouts" in page.evaluate(heads)[0]
    assert [row.split(" · ")[0] for row in page.evaluate(ROWS)[: 2 * GROUP]] == ["step 1"] * GROUP + ["step 9"] * GROUP
    last = "[...document.querySelector('#steps tbody').lastChild.children].map(cell => cell.textContent)"
    cells, heads = page.evaluate(last), page.evaluate("[...document.querySelectorAll('#steps thead th')].map(head => head.textContent)")
    means = page.evaluate("[...document.querySelectorAll('#steps tr.chosen')].map(row => [...row.children].map(cell => cell.textContent))")
    at = heads.index("reward before KL")
    assert cells[0] == "9 less 1" and len(means) == 2
    assert float(cells[at].replace("−", "-")) == pytest.approx(float(means[1][at]) - float(means[0][at]), abs=0.2)  # three digits


def test_the_keyboard_moves_through_list_and_tokens(page):
    page.evaluate("document.querySelector('#list').focus()")
    press(page, "ArrowDown")
    page.wait_for("document.querySelector('.tokens').textContent.includes('onerror')")
    assert (
        page.evaluate("document.querySelector(`#${document.querySelector('#list').getAttribute('aria-activedescendant')}`).ariaSelected")
        == "true"
    )
    press(page, "End")
    page.wait_for(f"{PANES}[0].startsWith('Step 9, group 9')")
    page.evaluate("document.querySelector('.tokens').focus()")
    press(page, "ArrowRight")
    press(page, "ArrowRight")
    assert page.evaluate(READOUT).startswith("Token 2 of ") and "sampled by policy version 8" in page.evaluate(READOUT)
    assert "trainer less engine" in page.evaluate(READOUT) and "KL " in page.evaluate(READOUT)


def test_tokens_are_coloured_by_sign_and_size(page):
    choose(page, colour="kl")
    colours = "[...document.querySelectorAll('.tokens span')].map(t => [t.className, getComputedStyle(t).backgroundColor])"
    page.wait_for(f"{colours}.length > 5 && new Set({colours}.map(c => c[1])).size > 3")
    found = page.evaluate(colours)
    blue = [colour for name, colour in found if "plus" in name and "rgba(47, 111, 219" in colour]
    orange = [colour for name, colour in found if "minus" in name and "rgba(217, 115, 13" in colour]
    assert blue and orange and len(blue) + len(orange) >= 0.8 * len(found)
    page.set_scheme(dark=True)
    page.wait_for(f"{colours}.some(c => c[1].includes('110, 168, 255'))")
    choose(page, colour="")
    page.wait_for(f"{colours}.every(c => c[1] === 'rgba(0, 0, 0, 0)')")


def test_one_rollout_stays_beside_others(page):
    page.evaluate("document.querySelector('.pane h2 button').click()")
    page.evaluate("document.querySelector('#list').focus()")
    press(page, "PageDown")
    page.wait_for(f"{PANES}.length === 2")
    assert page.evaluate(PANES)[0].startswith("Step 1, group 0") and not page.evaluate(PANES)[1].startswith("Step 1, group 0")
    page.evaluate("document.querySelectorAll('.pane')[1].querySelectorAll('.siblings button')[0].click()")
    page.wait_for(
        f"{PANES}.length === 2 && document.querySelectorAll('.pane')[1].querySelector('[aria-current=true]').matches(':first-child')"
    )


def test_a_tools_tokens_and_policies_of_several_versions_are_marked(browser, tmp_path):
    page = tmp_path / "tools.html"
    page.write_text(render_rollouts(tool_table(tiny_tokenizer(), tiny_params().rl), "tools"), encoding="utf-8")
    open_page(browser, page)
    untrained = "[...document.querySelectorAll('.pane .untrained')].map(t => t.textContent).join('')"
    assert browser.evaluate(untrained) == " the tool says 9 "
    assert browser.evaluate("[...document.querySelectorAll('.pane sup')].map(mark => mark.textContent)") == ["v2", "v3"]
    browser.evaluate("document.querySelector('.pane .untrained').dispatchEvent(new PointerEvent('pointerover', {bubbles: true}))")
    assert "put in, not sampled · not trained on" in browser.evaluate(READOUT) and "probability" not in browser.evaluate(READOUT)
    assert browser.problems == []


def test_the_page_fits_a_narrow_window(browser, run):
    browser.call("Emulation.setDeviceMetricsOverride", width=390, height=800, deviceScaleFactor=1, mobile=False)
    try:
        open_page(browser, run / "reports/rollouts.html")
        assert browser.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    finally:
        browser.call("Emulation.setDeviceMetricsOverride", width=1400, height=900, deviceScaleFactor=1, mobile=False)


@pytest.mark.long
def test_ten_thousand_rollouts_are_there_within_two_seconds(browser, tmp_path):
    page = tmp_path / "many.html"
    table = made_table(tiny_tokenizer(), tiny_params().rl, steps=dict.fromkeys(range(1, 11), 1000), words=100)
    page.write_text(render_rollouts(table, "many"), encoding="utf-8")
    open_page(browser, page)
    paint = browser.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    assert paint < 2000 and float(browser.evaluate("document.body.dataset.ready")) < 2000
    assert browser.evaluate("document.querySelectorAll('.row').length") < 60
    browser.evaluate("document.querySelector('#list').scrollTop = 1e9")
    browser.wait_for(f"{ROWS}.at(-1)?.includes('step 10')")
    start = time.monotonic()
    choose(browser, text="largest of 9 ", order="-1")
    browser.evaluate(COUNT)
    assert time.monotonic() - start < 2 and browser.problems == []
