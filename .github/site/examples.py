"""An extension of griffe: the repository's docstrings say ``Example:``, which Google's style knows as ``Examples:``, as code."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Examples(griffe.Extension):
    """Read each docstring's example as code, not as Markdown, which takes ``[(1, 2)]`` for a link."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(
                r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE
            )
