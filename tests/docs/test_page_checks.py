"""Which pages are refused: for commands, recipes and imports that do not exist."""

from __future__ import annotations

import pytest

from tests.docs.markdown import blocks_of
from tests.docs.page_checks import problems_of_page


def problems(*parts: str) -> list[str]:
    pairs = zip(parts[::2], parts[1::2], strict=True)
    page = "".join(f"```{info}\n{text}\n```\n" for info, text in pairs)
    return problems_of_page(blocks_of(page))


@pytest.mark.parametrize(
    "parts",
    [
        ("sh run=never reason=elsewhere", "headrace status --json\nkubectl get pods"),
        ("sh run=never reason=interactive", "headrace up"),
        ("python", "import json\nfrom headrace import Episode, Observation"),
        ("python run=never reason=elsewhere", "answer = await episode.generate('a')"),
        ("python run=never reason=needs-install", "import not_installed"),
        ("python file=own.py", "class Own: ...", "python", "from own import Own"),
        ("toml", "[tasks]\nsamples = 4"),
        ("toml", "[environments.default]\nuse = 'http'\noptions = { url = 'http://a' }"),
        ("toml over=mini-swe", "[environments.default.options]\ntool = 'shell'\nimage = 'a'"),
        ("toml", "[environments.default]\nuse = 'textarena'\noptions = { id = 'a', call_s = 1 }"),
        ("python file=own.py", "class Own: ...", "toml", "[agents.default]\nuse = 'own:Own'"),
        ("toml file=ceilings.toml", "memory_mb = 1"),
        ("json file=a.json", "[1]"),
        ("text", "headrace nonsense"),
    ],
)
def test_a_right_page(parts: tuple[str, ...]) -> None:
    assert problems(*parts) == []


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        (("sh run=never reason=elsewhere", "ls\nheadrace rn"), "line 2: headrace rn: No such"),
        (("sh run=never reason=long", "headrace down"), "would end the stack that the pages"),
        (("sh", "headrace run 'x"), "a quotation has no end"),
        (("python", "def f(:"), "line 2: invalid syntax"),
        (("python", "import not_installed"), "No module named 'not_installed'"),
        (("python", "from headrace import Nothing"), "headrace has no Nothing"),
        (("python file=own.py", "A = 1", "python", "from own import B"), "own has no B"),
        (("toml", "[tasks]\nsample = 4"), "tasks.sample"),
        (("toml", "[tasks"), "line 2: "),
        (("toml over=frozen", "[tasks]"), "frozen.toml"),
        (("toml", "[tasks]\nuse = 'jsonl'\noptions = { name = 'a' }"), "tasks.options: got an"),
        (
            ("toml", "[environments.default.options]\nids = 'a'"),
            "environments.default.options: g",
        ),
        (
            ("toml", "[environments.a]\nuse = 'docker'\noptions = { img = 'a' }"),
            "environments.a.",
        ),
        (("python file=own.py", "A = 1", "toml", "[agents.default]\nuse = 'own:B'"), "has no B"),
        (("toml file=a.toml", "[policies.default]\nmodels = 'a'"), "policies.default.models"),
        (("json file=a.json", "{"), "line 2: Expecting"),
    ],
)
def test_a_wrong_page(parts: tuple[str, ...], problem: str) -> None:
    found = problems(*parts)
    assert any(problem in one for one in found), found
