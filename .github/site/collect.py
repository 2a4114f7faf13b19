"""A hook of mkdocs: the repository's Markdown files are the site's pages, at their own paths, so that links work here as they do there.

A file of code that a page links to becomes a page, too. A link to a folder leads to its README, or is plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files, InclusionLevel

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
ROOMS = (".github", "examples", "kernels_c", "opjit", "tests/benchmarks")
TEMPLATES = (".github/pull_request_template.md",)
LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)]*)?\)")
ALERT = re.compile(
    r"^> \[!(NOTE|TIP|IMPORTANT|WARNING|CAUTION)\]\n((?:>.*\n?)+)", flags=re.MULTILINE
)
LANGUAGES = {
    ".py": "python",
    ".c": "c",
    ".h": "c",
    ".cu": "cuda",
    ".cpp": "cpp",
    ".ipynb": "json",
    ".yml": "yaml",
    ".toml": "toml",
}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages, the pictures, and the code that pages link to."""
    pages = [
        ROOT / "README.md",
        *(page for room in ROOMS for page in sorted((ROOT / room).rglob("*.md"))),
    ]
    for page in pages:
        name = page.relative_to(ROOT).as_posix()
        if name not in TEMPLATES and "site/" not in name:
            files.append(_file(config, name, abs_src_path=str(page)))
            for _, target, _ in LINK.findall(page.read_text(encoding="utf-8")):
                _add(files, config, _relative(page.parent / target))
    return files


def _add(files: Files, config: MkDocsConfig, name: str) -> None:
    """Add the file that a link names: a picture as it is, code as a page."""
    path = ROOT / name
    if not path.is_file() or path.suffix == ".md":
        return
    if path.suffix == ".svg":
        added = _file(config, name, abs_src_path=str(path))
    else:
        language = LANGUAGES.get(path.suffix, "text")
        added = _file(
            config,
            f"{name}.md",
            content=f"---\nsearch:\n  exclude: true\n---\n\n# {name}\n\n````{language}\n{path.read_text(encoding='utf-8')}\n````\n",
        )
    if added.src_uri not in files.src_uris:
        files.append(added)


def _file(config: MkDocsConfig, name: str, **source: str) -> File:
    file = File.generated(config, name, **source)
    file.inclusion = (
        InclusionLevel.INCLUDED
    )  # mkdocs leaves out folders with a dot, and web servers hide them
    file.dest_uri = file.dest_uri.removeprefix(".github/")
    return file


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead each link to the page of what it names."""
    folder = (ROOT / page.file.src_uri).parent

    def led(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = folder / target
        if path.is_dir():
            return (
                f"[{text}]({target.rstrip('/')}/README.md{anchor})"
                if (path / "README.md").is_file()
                else text
            )
        if path.suffix in (".md", ".svg") or not path.is_file():
            return link[0]
        return f"[{text}]({target}.md{anchor})"

    parts = re.split(
        r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE
    )  # code is left as it is
    return "".join(
        part if part.startswith("```") else LINK.sub(led, ALERT.sub(_admonition, part))
        for part in parts
    )


def _admonition(alert: re.Match[str]) -> str:
    """Turn an alert of GitHub into an admonition of the site."""
    text = re.sub(r"^> ?", "    ", alert[2], flags=re.MULTILINE)
    return f"!!! {alert[1].lower()}\n\n{text}"


def on_post_build(config: MkDocsConfig) -> None:
    """Refuse a site with an alert that is not rendered, or a link or a picture that leads nowhere."""
    site = Path(config.site_dir)
    for page in sorted(site.rglob("*.html")):
        if re.search(r"<p>\[!\w+\]", page.read_text(encoding="utf-8")):
            raise PluginError(f"{page.relative_to(site)} has an alert that is not rendered")
        links = (
            re.findall(r'(?:href|src)="([^"#?]+)', page.read_text(encoding="utf-8"))
            if page.name != "404.html"
            else []
        )
        for link in links:
            if not re.match(r"\w+:|//", link) and not (page.parent / link).exists():
                raise PluginError(
                    f"{page.relative_to(site)} links to {link}, which is not on the site"
                )


def _relative(path: Path) -> str:
    return Path(os.path.normpath(path)).relative_to(ROOT).as_posix()
