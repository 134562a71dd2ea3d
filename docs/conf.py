"""Sphinx: the pages of this folder, and the API from the docstrings (`scripts/docs.sh`)."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from sphinx.application import Sphinx

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ["KERAS_BACKEND"] = "torch"  # one framework to import, not two: the names are the same

from hvdtrain.core.version import __version__

project = "hvdtrain"
version = release = __version__
copyright = "the hvdtrain authors"

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxarg.ext"]
myst_heading_anchors = 4  # as GitHub makes them
html_theme = "furo"
pygments_style = "default"  # whose diffs are red and green
html_title = f"hvdtrain {version}"
html_static_path = ["static"]
html_css_files = ["pages.css"]
html_js_files = ["pages.js"]
html_copy_source = html_show_sourcelink = False

default_role = "literal"  # docstrings write `code` as Markdown does
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False  # PyTorch's refer to its own pages
python_maximum_signature_line_length = 88
napoleon_numpy_docstring = False
napoleon_attr_annotations = False

# Nothing is asked of a network: names of others, and of what is not public here, are shown and lead nowhere.
OTHERS = r"(torch|nn|np|numpy|keras|collections|contextlib|pathlib|os)\..*"
INTERNAL = r"hvdtrain(\.\w+){3,}"
ALIASES = (
    r"Balance|BatchNorm|Chunk|Initialise|Loss|Part|Schedule|SplitDoesNotPay|Tensor|Weight|plan\.\w+|hvdtrain\.\w+\.T"
)
nitpick_ignore_regex = [("py:.*", names) for names in (OTHERS, INTERNAL, ALIASES)]


def keep_text(app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]) -> None:
    """Keeps napoleon from taking what stands before a colon for a type, which the annotation has already.

    It does so in the first line of a property and of Returns; an empty type before it leaves the text whole.
    Also makes a code block of what follows `Example:`.
    """
    for number, line in enumerate(lines):
        begins = lines[number - 1].strip() in ("Returns:", "Yields:") if number else what in ("property", "attribute")
        if begins:
            lines[number] = re.sub(r"(?=\S)", ": ", line, count=1)
    if "Example:" in lines:
        at = lines.index("Example:")
        lines[at : at + 1] = ["Example::", ""]


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-docstring", keep_text, priority=400)  # before napoleon's
