"""The documentation site is whole, opens without the net, and lists every key of params.yaml."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from chromium import CHROMIUM, Browser

from rlhf_core.config import Params
from rlhf_core.config.base import section_keys
from tools.docs_site.__main__ import build, problems, problems_of_navigation
from tools.docs_site.pages import relinked, site_path
from tools.docs_site.reference import params_page

ROOT = Path(__file__).parents[3]
OPENED = "document.querySelector('label[for=__search], button.md-search__button, [class*=md-search] button')"
SEARCH = "[...document.querySelectorAll('*')].find(node => node.shadowRoot)?.shadowRoot"
TYPE = f"""(() => {{
  const field = {SEARCH}.querySelector('input[type=text]');
  field.value = 'dual clip';
  field.dispatchEvent(new Event('input', {{bubbles: true}}));
}})()"""
REPEATED = re.compile(r"`([\w.\[\]]+)` .*Its keys are those of `([\w.\[\]]+)`")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site of this checkout, built in another folder."""
    pytest.importorskip("zensical")
    folder = tmp_path_factory.mktemp("checkout")
    for path in ROOT.iterdir():
        if path.name not in ("scratch", "site", "runs", "mkdocs.yml") and not path.name.startswith("."):
            (folder / path.name).symlink_to(path)
    shutil.copyfile(ROOT / "mkdocs.yml", folder / "mkdocs.yml")  # whose real path is the site's root
    assert build(folder) is None
    return folder / "site"


def test_every_page_of_docs_is_in_the_navigation():
    assert problems_of_navigation(ROOT) == ""


def test_links_lead_to_pages_of_the_site_and_code_stays():
    text = "[a](../params.yaml) [b](tables/rl.md#x) [c](https://x.org) [d](#here)\n```\n[e](../params.yaml)\n```\n"
    changed, linked = relinked(text, Path("docs/page.md"))
    assert changed == text.replace("(../params.yaml) ", "(files/params.yaml.md) ")
    assert linked == [Path("params.yaml"), Path("docs/tables/rl.md")]
    assert site_path(Path("docs/tables/trl.csv")) == Path("tables/trl.csv.md")
    assert site_path(Path("docs/images/report.png")) == Path("images/report.png")


def test_the_page_of_params_has_every_key():
    page = params_page(ROOT)
    listed = set(re.findall(r"^\| `([\w.\[\]]+)`", page, re.MULTILINE))
    repeated = dict(REPEATED.findall(page))
    missing = []
    for key in (name.replace(".0.", "[].") for name in section_keys(Params)):
        section = key.split(".")[0]
        of_training = f"## {section}" in page and re.sub(rf"^{section}\.", "training.", key) in listed
        elsewhere = any(key.startswith((f"{path}.", f"{path}[]")) for path in repeated)
        if key not in listed and not of_training and not elsewhere and "." in key:
            missing.append(key)
    assert missing == []
    assert '| `rl.kl.estimator` | k1 \\| k2 \\| k3 | `"k3"` |' in page


def test_what_a_page_would_fetch_and_markdown_left_as_text_are_found(tmp_path):
    (tmp_path / "a.html").write_text('<script src="https://cdn.example/x.js"></script><p>fine</p>')
    (tmp_path / "b.html").write_text("<p>| a |\n|---|\n</p><pre>|---|</pre>")
    assert problems(tmp_path).splitlines() == ['a.html: fetches <script src="https://cdn.example/x.js', "b.html: shows Markdown: |---|"]


def test_equations_are_mathml_and_code_keeps_its_dollars(site):
    text = (site / "algorithms.html").read_text()
    assert text.count("<math") > 40 and "$" not in re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert "$OPENAI_BASE_URL" in (site / "agents.html").read_text()


def test_search_and_functions_are_there_without_a_server(site):
    assert "window.Worker" in (site / "scripts/iframe-worker.js").read_text()
    assert "dual_clip" in (site / "search.js").read_text()
    assert 'id="rlhf_core.algorithms.advantages.gae"' in (site / "api.html").read_text()


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium (Debian: apt-get install chromium)")
def test_a_page_opened_from_the_disk_searches_and_fetches_nothing(site, tmp_path):
    with Browser(tmp_path) as browser:
        browser.open(site / "tables/rl.html")
        browser.evaluate(f"{OPENED}.click()")
        browser.wait_for(f"{SEARCH}?.querySelector('input[type=text]') != null")
        browser.evaluate(TYPE)
        browser.wait_for(f"{SEARCH}.textContent.includes('ppo_clip')")
        assert browser.problems == []
