"""A hook of mkdocs: the repository's pages become the site's, at the same paths, so that links
between them hold.

What a page links to and is no page, such as a record or a script, is copied beside it; a folder
becomes a list of its files. Marks of generated sections, which are HTML comments, do not show.
"""

import posixpath
import re
import subprocess
import sys
from pathlib import Path

from mkdocs.structure.files import File, Files, InclusionLevel

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(Path(__file__).parent)]

from reference import reference  # noqa: E402

LINK = re.compile(r'(?:\]\(|src=")(?!https?:|mailto:|#)([^)"#\s]+)')


def on_files(files: Files, config) -> Files:
    """Adds the pages, the files that they link to, and the reference."""
    listing = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    tracked = listing.splitlines()
    pages = [path for path in tracked if path.endswith(".md")]
    linked = {target for page in pages for target in links(page)}
    for path in sorted({*pages, *(linked & {*tracked})}):
        files.append(added(File.generated(config, path, abs_src_path=str(ROOT / path))))
    for folder in sorted(linked - {*tracked}):
        inside = [path for path in tracked if path.startswith(f"{folder}/")]
        if inside:
            listed = "\n".join(
                f"- [{path.removeprefix(f'{folder}/')}]({posixpath.basename(path)})"
                for path in inside
            )
            page = File.generated(
                config, f"{folder}/README.md", content=f"# {folder}\n\n{listed}\n"
            )
            files.append(added(page, InclusionLevel.NOT_IN_NAV))
            for path in {*inside} - linked:
                files.append(added(File.generated(config, path, abs_src_path=str(ROOT / path))))
    for path, text in reference().items():
        files.append(added(File.generated(config, path, content=text)))
    return files


def links(page: str) -> list[str]:
    """The paths in the repository that a page links to."""
    text = (ROOT / page).read_text()
    return [
        posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
        for link in LINK.findall(text)
    ]


def added(file: File, inclusion: InclusionLevel = InclusionLevel.INCLUDED) -> File:
    """The file with its place on the site, where web servers leave out folders that begin with a
    dot.
    """
    file.inclusion = inclusion
    file.dest_uri = file.dest_uri.replace(".github/", "project/")
    return file


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    """The page without marks, with folders' lists in the place of folders, and with pictures where
    they are now.
    """
    markdown = re.sub(r"<!-- /?[\w -]+ -->", "", markdown)
    folder = posixpath.dirname(page.file.src_uri)

    def picture(match: re.Match) -> str:
        file = files.get_file_from_path(posixpath.normpath(posixpath.join(folder, match[1])))
        if file is None:
            raise FileNotFoundError(f"{page.file.src_uri}: no picture {match[1]}")
        return f'src="{file.url_relative_to(page.file)}"'

    markdown = re.sub(r'src="(?!https?:)([^"]+)"', picture, markdown)
    return re.sub(r"\]\((?!https?:)([^)#\s]+)/\)", r"](\1/README.md)", markdown)
