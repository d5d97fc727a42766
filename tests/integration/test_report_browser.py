"""The report in a real headless Chromium, opened from the disk."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chromium import CHROMIUM, Browser
from report_workspace import HOSTILE, answer_otherwise, make_workspace, run_report

from flows.runs.results import read_side
from rlhf_core.report.colors import DARK, PURPLE
from rlhf_core.report.comparison_page import render_comparison

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")

ALL_DRAWN = "document.querySelectorAll('[data-figure]:not([data-drawn])').length === 0"
FIGURES = 22
# Texts of the visible cards, in order.
SHOWN = "[...document.querySelectorAll('#samples article')].map(card => card.innerText)"
GAINS = "[...document.querySelectorAll('#samples article')].map(card => Number(card.dataset.gain))"
COUNT = "document.querySelector('#samples output').textContent"
CONTROLS = "a[href], input, select, button:not([hidden]), summary"
# The set of `r,g,b` of the opaque pixels of a figure's canvas.
COLOURS = """(() => {
  const canvas = [...document.querySelectorAll('[data-figure=rl_kl]')].flatMap(function find(node) {
    return [...(node.shadowRoot ?? node).querySelectorAll('*')].flatMap(n => n.tagName === 'CANVAS' ? [n] : n.shadowRoot ? find(n) : []);
  }).find(c => c.width > 100);
  const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', {willReadFrequently: true});
  copy.drawImage(canvas, 0, 0);
  const {data} = copy.getImageData(0, 0, canvas.width, canvas.height);
  const colours = {};
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] === 255) colours[`${data[i]},${data[i + 1]},${data[i + 2]}`] = true;
  }
  return Object.keys(colours);
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workspace = make_workspace(tmp_path_factory.mktemp("report") / "workspace", hostile=True)
    done = run_report(workspace)
    assert done.returncode == 0, done.stdout + done.stderr
    return workspace / "reports/report.html"


@pytest.fixture
def page(browser: Browser, report: Path) -> Iterator[Browser]:
    """The report, opened anew; a test must leave no error in the console."""
    browser.problems.clear()
    browser.set_scheme(dark=False)
    browser.open(report)
    browser.wait_for(ALL_DRAWN)
    yield browser
    assert browser.evaluate("window.hacked") is None
    assert browser.problems == []


def choose(page: Browser, name: str, value: str) -> None:
    page.evaluate(
        f"(() => {{ const e = document.querySelector('#samples form').elements.{name}; e.value = {value!r};"
        " e.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def rgb(color: str) -> str:
    return ",".join(str(int(color[i : i + 2], 16)) for i in (1, 3, 5))


def test_every_figure_is_drawn(page):
    assert page.evaluate("document.querySelectorAll('[data-drawn]').length") == FIGURES
    assert page.evaluate("Math.min(...[...document.querySelectorAll('[data-figure]')].map(e => e.offsetHeight))") >= 200
    page.wait_for(f"{COLOURS}.includes('{rgb(PURPLE)}')")  # the curve's own purple is among the pixels


def test_figures_follow_the_colour_scheme(page):
    page.set_scheme(dark=True)
    page.wait_for("getComputedStyle(document.body).backgroundColor === 'rgb(20, 23, 28)'")
    page.wait_for(f"{ALL_DRAWN} && {COLOURS}.includes('{rgb(DARK[PURPLE])}')")
    assert rgb(PURPLE) not in page.evaluate(COLOURS)
    assert page.evaluate("document.querySelectorAll('[data-drawn]').length") == FIGURES


def test_pointing_at_a_curve_shows_its_step(page):
    page.evaluate("document.querySelector('[data-figure=rl_kl]').scrollIntoView({block: 'center', behavior: 'instant'})")
    box = "document.querySelector('[data-figure=rl_kl]').getBoundingClientRect()"
    x, y = page.evaluate(f"(() => {{ const b = {box}; return [b.x + b.width / 2, b.y + 90]; }})()")
    page.hover(x - 5, y)
    page.hover(x, y)
    tooltip = "[...document.querySelectorAll('.bk-Tooltip')].map(t => t.shadowRoot.textContent).join(' ')"
    page.wait_for(f"{tooltip}.includes('KL to SFT')", seconds=10)


def test_hostile_text_stays_text(page):
    choose(page, "text", "window.hacked")
    texts = page.evaluate("[...document.querySelectorAll('#samples .answer .text')].map(e => e.textContent)")
    # Three hostile strings, two modes, two models.
    assert sorted(texts) == sorted(4 * HOSTILE[:3])
    assert page.evaluate("document.querySelectorAll('#samples :is(script, img, iframe, object)').length") == 0
    choose(page, "text", "right ⟨u+202e⟩to left")
    assert page.evaluate(COUNT) == "2 of 80"
    choose(page, "text", "a nul ⟨u+0000⟩, a bell ⟨u+0007⟩")
    assert page.evaluate(COUNT) == "2 of 80"
    choose(page, "text", "{{ 7 * 7 }}")
    assert page.evaluate(COUNT) == "2 of 80"


def test_a_huge_line_does_not_widen_the_page(page):
    choose(page, "text", "98,000 more characters")
    assert page.evaluate(COUNT) == "2 of 80"
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_search_and_filters(page):
    assert page.evaluate(COUNT) == "80 of 80" and len(page.evaluate(SHOWN)) == 12
    page.evaluate("document.querySelector('.more').click()")
    assert len(page.evaluate(SHOWN)) == 24
    choose(page, "text", "LARGEST OF 3 8 2")
    shown = page.evaluate(SHOWN)
    assert shown and all("largest of 3 8 2" in text for text in shown)
    choose(page, "mode", "sampled")
    assert len(page.evaluate(SHOWN)) == len(shown) / 2
    choose(page, "text", "no such text")
    assert page.evaluate(SHOWN) == [] and page.evaluate(COUNT) == "0 of 80"


def test_largest_gains_and_losses_come_first(page):
    changes = [abs(gain) for gain in page.evaluate(GAINS)]
    assert changes == sorted(changes, reverse=True) and changes[0] > changes[-1]
    choose(page, "order", "gains")
    gains = page.evaluate(GAINS)
    assert gains == sorted(gains, reverse=True) and gains[-1] > 0
    choose(page, "order", "losses")
    losses = page.evaluate(GAINS)
    assert losses == sorted(losses) and losses[-1] < 0 < len(losses)


def test_what_the_judge_sees_otherwise_now(page):
    choose(page, "changed", "fixed")
    marks = (
        "[...document.querySelectorAll('#samples article')].map(c => [...c.querySelectorAll('.badge')].map(b => b.textContent).join(''))"
    )
    assert set(page.evaluate(marks)) == {"✗✓"}
    choose(page, "changed", "broken")
    assert set(page.evaluate(marks)) == {"✓✗"}


def test_a_script_that_gets_in_does_not_run(page):
    """The content security policy is the second barrier if escaping fails."""
    page.evaluate("document.body.insertAdjacentHTML('beforeend', `<img src=x onerror='window.hacked = true'>`)")
    page.evaluate(
        "(() => { const s = document.createElement('script'); s.textContent = 'window.hacked = true'; document.body.append(s); })()"
    )
    page.wait_for("new Promise(resolve => setTimeout(() => resolve(true), 200))")
    assert page.evaluate("window.hacked") is None
    assert any("Content Security Policy" in problem for problem in page.problems)
    page.problems.clear()


def test_the_page_of_a_stopped_chain_opens_without_samples(browser, tmp_path):
    workspace = make_workspace(tmp_path)
    assert run_report(workspace, "--stopped-at", "gate_reward").returncode == 0
    browser.problems.clear()
    browser.open(workspace / "reports/stopped.html")
    browser.wait_for(ALL_DRAWN)
    assert browser.evaluate("document.querySelectorAll('[data-drawn]').length") == 11
    assert browser.evaluate("document.querySelector('.stopped').innerText").startswith("Unfinished run.")
    assert browser.problems == []


def test_the_page_of_two_runs_draws_and_filters(browser, tmp_path, report):
    other = make_workspace(tmp_path / "other", hostile=True)
    answer_otherwise(other)
    sides = [read_side(folder.parent, folder.name) for folder in (report.parents[1], other)]
    page = tmp_path / "compare.html"
    page.write_text(render_comparison(*sides), encoding="utf-8")
    browser.problems.clear()
    browser.open(page)
    browser.wait_for(ALL_DRAWN)
    assert browser.evaluate("document.querySelectorAll('[data-drawn]').length") == 9
    # Only the hostile answers differ.
    assert browser.evaluate(COUNT) == f"{2 * len(HOSTILE)} of {2 * len(HOSTILE)}"
    assert browser.evaluate("document.querySelectorAll('#samples :is(script, img, iframe, object)').length") == 0
    choose(browser, "mode", "greedy")
    assert browser.evaluate(COUNT) == f"{len(HOSTILE)} of {2 * len(HOSTILE)}"
    assert browser.evaluate("window.hacked") is None and browser.problems == []


def test_the_keyboard_reaches_every_control_and_shows_where_it_is(page: Browser):
    wanted = page.evaluate(f"document.querySelectorAll('{CONTROLS}').length")
    page.evaluate("document.activeElement.blur()")
    reached = set()
    for _ in range(wanted + 60):  # scrolling texts and tables are stops too
        for kind in ("rawKeyDown", "keyUp"):
            page.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        reached.add(page.evaluate(f"[...document.querySelectorAll('{CONTROLS}')].indexOf(document.activeElement)"))
        framed = (
            "[document.activeElement, document.activeElement.closest('.plot')].some(e => e && getComputedStyle(e).outlineWidth === '2px')"
        )
        assert page.evaluate(f"document.activeElement === document.body || {framed}")
    assert len(reached - {-1}) == wanted


def test_nothing_is_cut_off_or_left_over_in_print(page: Browser):
    page.call("Emulation.setDeviceMetricsOverride", width=690, height=900, deviceScaleFactor=1, mobile=False)
    page.call("Emulation.setEmulatedMedia", media="print", features=[])
    hidden = "[...document.querySelectorAll('nav, .controls, .more')].every(e => getComputedStyle(e).display === 'none')"
    cut = (
        "[...document.querySelectorAll('.scroll, .text, pre')].filter(e => e.checkVisibility()"
        " && e.scrollHeight > e.clientHeight + 1 && getComputedStyle(e).overflowY !== 'visible').length"
    )
    assert page.evaluate(hidden) and page.evaluate(cut) == 0
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    page.call("Emulation.setEmulatedMedia", media="", features=[])
    page.call("Emulation.setDeviceMetricsOverride", width=1200, height=900, deviceScaleFactor=1, mobile=False)
