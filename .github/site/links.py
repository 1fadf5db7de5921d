"""python links.py FOLDER: every link of a built site, its pictures and scripts too, leads to a file and heading of it.

mkdocs checks links that are written in Markdown; these are all that browsers follow. Links to other
sites are not tried.
"""

import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Page(HTMLParser):
    """What a page links to, and the names of its places."""

    def __init__(self, path: Path):
        super().__init__()
        self.links: list[str] = []
        self.places = {""}
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value:
                self.links.append(value)
            elif name in ("id", "name") and value:
                self.places.add(value)


def broken(folder: Path) -> list[str]:
    """The links that lead nowhere, each with its page."""
    pages = {
        path.resolve(): Page(path) for path in folder.rglob("*.html") if path.name != "404.html"
    }
    if not pages:
        return [f"{folder} has no pages"]
    found = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            target = target / "index.html" if target.is_dir() else target
            place = unquote(parts.fragment)
            if not target.is_file() or (target in pages and place not in pages[target].places):
                found.append(f"{path.relative_to(folder.resolve())} -> {link}")
    return sorted(set(found))


if __name__ == "__main__":
    problems = broken(Path(sys.argv[1]))
    print(*problems, sep="\n")
    sys.exit(f"{len(problems)} links lead nowhere" if problems else 0)
