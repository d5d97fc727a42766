"""Builds the documentation site from docs/ and fails if a link leads nowhere or a page would fetch something from the net.

python -m tools.docs_site        # site/index.html, which opens without a server
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from tools.docs_site.pages import lay_out
from tools.docs_site.reference import params_page

ROOT = Path(__file__).parents[2]
SOURCES = Path("scratch/docs_site")  # docs_dir of mkdocs.yml
SITE = Path("site")
MADE = {"params.md", "contributing.md"}  # pages that are no files of docs/
SECONDS = 300
# Starts the search's worker from its text, because a page that was opened as a file may load none from another file.
# mkdocs.yml names it, since Zensical would otherwise fetch a script of this name from a CDN.
WORKER = Path("scripts/iframe-worker.js")
WORKER_SCRIPT = """window.Worker = class extends window.Worker {
  constructor() { super(URL.createObjectURL(new Blob([%s], {type: "text/javascript"}))); }
};
"""
FETCHED = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?\b(?:src|href)=["']?(?:https?:)?//[^"'\s>]+""")


def main() -> None:
    argparse.ArgumentParser(
        prog="python -m tools.docs_site", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    ).parse_args()
    sys.exit(build(ROOT))


def build(root: Path) -> str | None:
    """Build the site. None, or what is wrong with it."""
    if missing := problems_of_navigation(root):
        return missing
    lay_out(root, root / SOURCES, {Path("docs/params.md"): params_page(root)})
    shutil.copyfile(Path(__file__).parent / "style.css", root / SOURCES / "style.css")
    shutil.rmtree(root / SITE, ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file", "mkdocs.yml"]
    environment = os.environ | {"NO_COLOR": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode:
        return f"zensical: expected a site without warnings, got\n{done.stdout}{done.stderr}"
    embed_worker(root / SITE)
    return problems(root / SITE) or print(f"{SITE}/index.html")


def problems_of_navigation(root: Path) -> str:
    """Pages that mkdocs.yml names and that aren't there, and pages of docs/ that it leaves out."""
    named = set(re.findall(r"^ +- .*: (\S+\.md)$", (root / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE))
    there = {str(path.relative_to(root / "docs")) for path in (root / "docs").rglob("*.md")} | MADE
    missing = [f"mkdocs.yml: expected pages that exist, got {name}; correct it" for name in sorted(named - there)]
    return "\n".join([*missing, *(f"mkdocs.yml: expected {name} in nav; add it" for name in sorted(there - named))])


def embed_worker(site: Path) -> None:
    """Write the script that starts the search's worker."""
    (worker,) = site.glob("assets/javascripts/workers/search.*.js")
    (site / WORKER).parent.mkdir()
    (site / WORKER).write_text(WORKER_SCRIPT % json.dumps(worker.read_text(encoding="utf-8")), encoding="utf-8")


def problems(site: Path) -> str:
    """What the generator doesn't check: addresses that a page fetches, and Markdown that was left as text."""
    found = []
    for page in sorted(site.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        shown = re.sub(r"<(pre|code|script|style|math)\b.*?</\1>", "", text, flags=re.DOTALL)
        found += [f"{page.relative_to(site)}: fetches {address}" for address in FETCHED.findall(text)]
        found += [
            f"{page.relative_to(site)}: shows Markdown: {left}"
            for left in re.findall(r"^.*(?:\|--|\]\(|\*\*|```|\$).*$|^(?:<p>)?(?:- |\d\. ).*$", shown, re.MULTILINE)
        ]
    return "\n".join(found)


if __name__ == "__main__":
    main()
