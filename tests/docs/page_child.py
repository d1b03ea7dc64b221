"""Executes the Python blocks of a page: `python page_child.py PAGE`, with one namespace for all.

Each line of stdin is a JSON object: `folder`, `line` and `text` of a block. For each, one line of
JSON goes to the descriptor that the second argument names: the traceback, or null.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import linecache
import os
import sys
import traceback
import types


def main() -> None:
    page, answers = sys.argv[1], int(sys.argv[2])
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.argv = [page]
    sys.path[0] = ""  # The folder in which a block runs, as in an interactive Python.
    for line in sys.stdin:
        block = json.loads(line)
        os.chdir(block["folder"])
        sys.stdout.flush()
        error = _execute(module, page, "\n" * (block["line"] - 1) + block["text"])
        os.write(answers, json.dumps(error).encode() + b"\n")


def _execute(module: types.ModuleType, page: str, text: str) -> str | None:
    """Executes a block. Returns the traceback of what it raised, or None."""
    linecache.cache[page] = (len(text), None, text.splitlines(keepends=True), page)
    try:
        code = compile(text, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        result = eval(code, module.__dict__)
        if code.co_flags & inspect.CO_COROUTINE:
            asyncio.run(result)
    except BaseException:
        return traceback.format_exc()
    return None


if __name__ == "__main__":
    main()
