"""Imports of packages that only one extra of Headrace installs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from headrace.errors import UsageError


@contextmanager
def importing(extra: str) -> Iterator[None]:
    """Raise UsageError if an import inside fails, and say which extra installs the package.

    Warnings that packages raise while they are imported are hidden.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except ImportError as error:
        raise UsageError(f"{error}: run pip install 'headrace[{extra}]'") from None
