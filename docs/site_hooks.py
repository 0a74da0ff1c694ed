"""What mkdocs does not do by itself: pages from above ``docs/``, and links out of it.

The README is the site's quick start; a link to a file that is no page becomes its name.
"""

import posixpath
import re
from pathlib import Path
from typing import Any, Final

from mkdocs.structure.files import File

ROOT: Final = Path(__file__).parents[1]
PAGES: Final = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
}
"""Files above ``docs/``, and the pages that they are."""

_LINK: Final = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s]+)\)")


def on_config(config: Any) -> Any:
    """A page that nobody has written yet is left out."""
    config.nav = [entry for entry in config.nav if _is_there(*entry.values())]
    return config


def on_files(files: Any, config: Any) -> Any:
    """The pages from above."""
    for source, page in PAGES.items():
        text = (ROOT / source).read_text("utf-8")
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as they are in the repository become links of the site."""
    name = page.file.src_uri
    above = {made: source for source, made in PAGES.items()}
    source = above.get(name, f"docs/{name}")
    return linked(markdown, folder=posixpath.dirname(source))


def linked(markdown: str, *, folder: str) -> str:
    """Markdown of a file in this folder of the repository, with the site's links."""

    def replaced(match: re.Match[str]) -> str:
        text, target = match.groups()
        if target.startswith("#") or "://" in target:
            return match[0]
        path, _, anchor = target.partition("#")
        inside = posixpath.normpath(posixpath.join(folder, path))
        page = PAGES.get(inside, inside.removeprefix("docs/"))
        if page == inside:
            return text  # a file of the repository, and no page
        return f"[{text}]({page}{'#' + anchor if anchor else ''})"

    return _LINK.sub(replaced, markdown)


def _is_there(page: str) -> bool:
    return page in PAGES.values() or (ROOT / "docs" / page).exists()
