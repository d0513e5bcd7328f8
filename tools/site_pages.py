"""A hook of mkdocs: what tests/docs_runner.py reads behind a fence's language becomes what a reader should see.

`skip="needs a GPU"` becomes the block's title, `check` is dropped. Other renderers show neither, which is as good.
"""

from __future__ import annotations

import re
from typing import Any

_FENCE = re.compile(r"^( *`{3,})(sh|python|text)[ \t]+([^`\n]+)$", re.M)


def on_page_markdown(markdown: str, **_: Any) -> str:
    return _FENCE.sub(_shown, markdown)


def _shown(fence: re.Match[str]) -> str:
    reason = re.search(r'skip="([^"]*)"', fence[3])
    return f"{fence[1]}{fence[2]}" + (f' title="not run by the tests: {reason[1]}"' if reason else "")
