"""The docstrings below the fields of classes. Schemas and the reference are made from them."""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap

from pydantic import BaseModel


@functools.cache
def attribute_docs(owner: type) -> dict[str, str]:
    """Returns the docstring below each field of a class and its bases, by field, as one line."""
    docs: dict[str, str] = {}
    for base in owner.__bases__:
        if base not in (BaseModel, object):
            docs |= attribute_docs(base)
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(body, ast.ClassDef)
    for field, doc in zip(body.body, body.body[1:], strict=False):
        match field, doc:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(words))),
            ):
                docs[name] = " ".join(words.split())
    return docs
