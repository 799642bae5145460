"""What mkdocs.yml adds to MkDocs: pages that lie elsewhere in the checkout, and links to files outside docs/.

A linked file becomes a part of the site, so that every link works without the repository; one that does not exist is
left as it is, and fails the build. A link to a folder becomes plain text.
"""

from __future__ import annotations

import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
# Page of the site -> file in the checkout.
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "patches.md": "patches/README.md",
}
_PAGE_OF = {file: page for page, file in PAGES.items()}
# [text](target) or [text](target#anchor), but no URL and no anchor alone.
_LINK = re.compile(r"\[([^][]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds PAGES and every file outside docs/ that a page links to."""
    for page, file in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / file).read_text(encoding="utf-8")))
    for file_ in list(files.documentation_pages()):
        for _, target, _ in _LINK.findall(file_.content_string):
            path = _in_checkout(file_.src_uri, target)
            uri = _uri(path)
            if (ROOT / path).is_file() and files.get_file_from_path(uri) is None:
                files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turns links into those of the site."""

    def replaced(link: re.Match[str]) -> str:
        text, target, anchor = link.groups(default="")
        path = _in_checkout(page.file.src_uri, target)
        if (ROOT / path).is_dir():
            return text
        if not (ROOT / path).is_file():
            return link[0]
        return f"[{text}]({posixpath.relpath(_uri(path), posixpath.dirname(page.file.src_uri) or '.')}{anchor})"

    return _LINK.sub(replaced, markdown)


def _in_checkout(page: str, target: str) -> str:
    """What a link of a page means, as a path from the root of the checkout."""
    source = PAGES.get(page, f"docs/{page}")
    return os.path.normpath(posixpath.join(posixpath.dirname(source), target))


def _uri(path: str) -> str:
    """Where a file of the checkout lies in the site."""
    if path in _PAGE_OF:
        return _PAGE_OF[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}"
