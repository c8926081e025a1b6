"""JSON for people: a list or an object that fits into a line stands in one."""

import json
import textwrap
from typing import Any

WIDTH = 110


def json_rows(content: Any, indent: str = "") -> str:
    line = json.dumps(content)
    if len(indent) + len(line) <= WIDTH or not isinstance(content, dict | list):
        return line
    if isinstance(content, list) and all(isinstance(each, int | float) for each in content):
        return textwrap.fill(line, WIDTH, subsequent_indent=f"{indent} ")
    items = [("", each) for each in content]
    if isinstance(content, dict):
        items = [(f"{json.dumps(name)}: ", each) for name, each in content.items()]
    inner = ",\n".join(f"{indent} {name}{json_rows(each, indent + ' ')}" for name, each in items)
    opening, closing = "{}" if isinstance(content, dict) else "[]"
    return f"{opening}\n{inner}\n{indent}{closing}"
