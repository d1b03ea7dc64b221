"""The variables of this process that a program on this host gets.

A worker's environment may hold passwords of Kafka and of a cloud. A program that runs the recipe's
or a model's commands gets only what most programs need to start.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from urllib.parse import urlsplit

from headrace.errors import UsageError

ALLOWED = frozenset(
    {
        *("PATH", "HOME", "USER", "LOGNAME", "SHELL", "TERM", "TZ", "TMPDIR", "LANG", "LANGUAGE"),
        *("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "XDG_RUNTIME_DIR"),
        *("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES"),
        *("VIRTUAL_ENV", "CONDA_PREFIX", "PYTHONPATH", "PYTHONHOME", "PYTHONUNBUFFERED"),
        *("PYTHONDONTWRITEBYTECODE", "PYTHONUTF8", "PYTHONIOENCODING", "PYTHONHASHSEED"),
        *("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
        *("NODE_EXTRA_CA_CERTS", "NO_PROXY", "no_proxy"),
        *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS"),
    }
)
ALLOWED_PREFIX = "LC_"
PROXIES = frozenset(
    {
        *("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"),
        *("http_proxy", "https_proxy", "all_proxy"),
    }
)
"""Allowed unless the URL has a user or a password."""


def allowed_environment(inherit: Sequence[str] = ()) -> dict[str, str]:
    """Returns the variables for a program: those that are allowed, and those that `inherit` names.

    A variable that is not set is left out. Raises UsageError if `inherit` is not a list of names.
    """
    check_names_of_variables(inherit)
    return {
        name: value
        for name, value in os.environ.items()
        if name in ALLOWED
        or name.startswith(ALLOWED_PREFIX)
        or name in inherit
        or (name in PROXIES and not _has_user(value))
    }


def check_names_of_variables(inherit: Sequence[str]) -> None:
    """Raises UsageError if `inherit` is not a list of names."""
    if isinstance(inherit, str) or not all(isinstance(name, str) and name for name in inherit):
        raise UsageError(
            f"inherit = {inherit!r}: give a list of names of environment variables, for example "
            '["HF_HOME"]'
        )


def _has_user(url: str) -> bool:
    try:
        return "@" in urlsplit(url if "//" in url else f"//{url}").netloc
    except ValueError:
        return True
