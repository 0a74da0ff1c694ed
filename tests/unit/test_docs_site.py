"""The documents as a site, and what of them is written from the code."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import readme
from readme import ROOT
from unit.test_docs import script

from kvloom.protocol import Reason
from kvloom_server.settings import ON, RouterSettings

DOCS = ROOT / "docs"


@pytest.mark.parametrize(
    ("writer", "document"),
    [
        ("write_settings.py", "settings.md"),
        ("write_reasons.py", "troubleshooting.md"),
    ],
)
def test_what_is_written_from_the_code_is_in_step(writer: str, document: str) -> None:
    """`python docs/WRITER` writes it."""
    text = (DOCS / document).read_text()
    assert script(f"docs/{writer}").updated(text) == text


def test_every_reason_is_explained() -> None:
    """Whatever the header may say."""
    text = (DOCS / "troubleshooting.md").read_text()
    table = text.partition("<!-- reasons:begin")[2]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == set(Reason)


def test_every_error_that_is_named_exists() -> None:
    """By its code and its status, in the router's sources."""
    router = ROOT / "server" / "kvloom_server" / "router"
    sources = "".join(path.read_text() for path in router.glob("*.py"))
    text = (DOCS / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| \d{3} ((?:`\w+`(?:, )?)+) \|", text, re.MULTILINE)
    codes = re.findall(r"`(\w+)`", "".join(rows))
    assert len(codes) >= 10
    for code in codes:
        assert f'"{code}"' in sources, code


def test_every_setting_and_metric_that_is_named_exists() -> None:
    """A name that is gone helps nobody."""
    known = (DOCS / "settings.md").read_text() + (DOCS / "operating.md").read_text()
    for page in ("troubleshooting.md", "concepts.md"):
        text = (DOCS / page).read_text()
        for name in re.findall(r"`(KVLOOM_\w+|kvloom_\w+_(?:total|seconds))", text):
            assert f"`{name}`" in known, f"{page} names {name}"


def test_what_on_stands_for_is_told() -> None:
    """`returns = on` leaves the choice to a release, and this is its choice."""
    assert (
        f"`on`: as this release likes, now `{ON}`."
        in (DOCS / "settings.md").read_text()
    )


def test_the_file_of_settings_that_is_shown_is_taken() -> None:
    """Copied out of the document."""
    (file,) = readme.blocks("toml", DOCS / "settings.md")
    assert len(RouterSettings(**tomllib.loads(file)).decode) == 2


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All pages, built as for a reader."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*command, f"--site-dir={folder}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built_without_a_warning(site: Path) -> None:
    """Links and anchors lead somewhere; each document is in the navigation."""
    start = (site / "index.html").read_text()
    for document in DOCS.glob("*.md"):
        page = document.with_suffix(".html").name
        assert (site / page).exists()
        assert f'href="{page}"' in start, f"{page} is not in the navigation"
    assert "make demo" in start


def test_the_site_needs_no_internet(site: Path) -> None:
    """No font, script, style or picture of anybody else."""
    loads = re.compile(r"""(?:src|<link[^>]*href)=["'](?:https?:)?//""")
    for page in site.glob("*.html"):
        assert not loads.search(page.read_text()), page
    for style in site.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//", style.read_text()), style


def test_nothing_but_pages_is_published(site: Path) -> None:
    """The writers and the result files stay where they are."""
    assert not list(site.rglob("*.py"))
    assert not (site / "results").exists()
