"""Pages of the site that are files of the repository's root, with the links that the site needs (mkdocs.yml)."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md", "SECURITY.md": "reporting.md"}


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Adds the pages of the root."""
    for name, page in PAGES.items():
        text = re.sub(r"\]\(docs/", "](", (ROOT / name).read_text(encoding="utf-8"))
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Leads links to files of the root to their pages."""
    for name, target in PAGES.items():
        markdown = markdown.replace(f"](../{name}", f"]({target}").replace(f"]({name}", f"]({target}")
    return markdown
