"""Hook of mkdocs: puts KaTeX, which `make docs` gets from npm, into the site: pages load nothing from elsewhere."""

import os
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

FILES = ("katex.min.js", "katex.min.css", "fonts/*.woff2")
"""Of the folder that the variable KATEX names, the dist of the npm package; they come into `katex/` of the site."""


def on_files(files: Files, *, config: Any) -> Files:
    folder = Path(os.environ.get("KATEX", ""))
    if not (folder / FILES[0]).is_file():
        raise PluginError("KATEX names no folder with katex.min.js: build the site by `make docs`")
    for path in sorted(path for pattern in FILES for path in folder.glob(pattern)):
        name = f"katex/{path.relative_to(folder).as_posix()}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_content(html: str, **_: Any) -> str:
    """Lets the name of a test begin a line, which is long and has no place to break."""
    return html.replace("::test_", "::<wbr>test_")
