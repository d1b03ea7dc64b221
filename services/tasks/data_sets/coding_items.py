"""A small set of programming tasks with hidden tests, for the tool `coding` of sandboxes.

A task's solution is here to prove that it can be solved; it is no part of what a task says.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from headrace.services.tasks.task_maker import Item


@dataclass(frozen=True, slots=True)
class Problem:
    """A function to write, calls of it with the values they must give, and one that gives them."""

    name: str
    prompt: str
    cases: tuple[tuple[list[Any], Any], ...]
    """Arguments and value, as JSON."""
    solution: str
    entry: str = "solve"


def items() -> Iterator[Item]:
    """All problems, in order. Their solutions stay here."""
    for problem in PROBLEMS:
        prompt = (
            f"Write a Python function `{problem.entry}`. {problem.prompt} "
            "Answer with the program alone."
        )
        cases = [list(case) for case in problem.cases]
        yield Item(problem.name, {"prompt": prompt, "entry": problem.entry, "cases": cases})


PROBLEMS = (
    Problem(
        "sum-of-evens",
        "solve(numbers) returns the sum of the even integers in a list.",
        (([[1, 2, 3, 4]], 6), ([[]], 0), ([[-2, 7, 10]], 8), ([[1, 3]], 0)),
        "def solve(numbers):\n    return sum(n for n in numbers if n % 2 == 0)\n",
    ),
    Problem(
        "reverse-words",
        "solve(text) returns the words of a text in reverse order, joined by single spaces.",
        ((["a b c"], "c b a"), (["  one  two "], "two one"), ([""], ""), (["x"], "x")),
        "def solve(text):\n    return ' '.join(reversed(text.split()))\n",
    ),
    Problem(
        "run-lengths",
        "solve(text) returns a list of [character, count], one for each run of equal characters.",
        (
            (["aaab"], [["a", 3], ["b", 1]]),
            ([""], []),
            (["abab"], [["a", 1], ["b", 1], ["a", 1], ["b", 1]]),
            (["zz"], [["z", 2]]),
        ),
        "from itertools import groupby\n"
        "def solve(text):\n    return [[c, len(list(run))] for c, run in groupby(text)]\n",
    ),
    Problem(
        "balanced",
        "solve(text) returns whether the brackets ()[]{} in a text are balanced.",
        (
            (["(a[b]{c})"], True),
            (["(]"], False),
            ([""], True),
            (["(("], False),
            (["}{"], False),
        ),
        "def solve(text):\n"
        "    pairs, stack = {')': '(', ']': '[', '}': '{'}, []\n"
        "    for c in text:\n"
        "        if c in pairs.values():\n"
        "            stack.append(c)\n"
        "        elif c in pairs and (not stack or stack.pop() != pairs[c]):\n"
        "            return False\n"
        "    return not stack\n",
    ),
    Problem(
        "roman",
        "solve(number) returns a number from 1 to 3999 as a Roman numeral.",
        (([1], "I"), ([4], "IV"), ([1994], "MCMXCIV"), ([3999], "MMMCMXCIX"), ([48], "XLVIII")),
        "def solve(number):\n"
        "    values = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1]\n"
        "    signs = 'M CM D CD C XC L XL X IX V IV I'.split()\n"
        "    text = ''\n"
        "    for value, sign in zip(values, signs):\n"
        "        text += sign * (number // value)\n"
        "        number %= value\n"
        "    return text\n",
    ),
    Problem(
        "primes-below",
        "solve(limit) returns all prime numbers below a limit, in rising order.",
        (([10], [2, 3, 5, 7]), ([2], []), ([0], []), ([30], [2, 3, 5, 7, 11, 13, 17, 19, 23, 29])),
        "def solve(limit):\n"
        "    return [n for n in range(2, limit) if all(n % d for d in range(2, int(n**.5) + 1))]\n",
    ),
    Problem(
        "merge-intervals",
        "solve(intervals) merges [first, last] intervals that overlap or touch, sorted by first.",
        (
            ([[[1, 3], [2, 6], [8, 10]]], [[1, 6], [8, 10]]),
            ([[]], []),
            ([[[5, 6], [1, 5]]], [[1, 6]]),
            ([[[1, 9], [2, 3]]], [[1, 9]]),
        ),
        "def solve(intervals):\n"
        "    merged = []\n"
        "    for first, last in sorted(intervals):\n"
        "        if merged and first <= merged[-1][1]:\n"
        "            merged[-1][1] = max(merged[-1][1], last)\n"
        "        else:\n"
        "            merged.append([first, last])\n"
        "    return merged\n",
    ),
    Problem(
        "transpose",
        "solve(rows) returns the transposed matrix, as a list of rows.",
        (([[[1, 2], [3, 4]]], [[1, 3], [2, 4]]), ([[[1, 2, 3]]], [[1], [2], [3]]), ([[]], [])),
        "def solve(rows):\n    return [list(column) for column in zip(*rows)]\n",
    ),
    Problem(
        "longest-unique",
        "solve(text) returns the length of the longest part of a text with no character twice.",
        ((["abcabcbb"], 3), (["bbbb"], 1), ([""], 0), (["pwwkew"], 3), (["dvdf"], 3)),
        "def solve(text):\n"
        "    best = start = 0\n"
        "    seen = {}\n"
        "    for i, c in enumerate(text):\n"
        "        if seen.get(c, -1) >= start:\n"
        "            start = seen[c] + 1\n"
        "        seen[c] = i\n"
        "        best = max(best, i - start + 1)\n"
        "    return best\n",
    ),
    Problem(
        "change",
        "solve(amount, coins) returns the fewest coins that make up an amount, or -1 if none do.",
        (([11, [1, 2, 5]], 3), ([3, [2]], -1), ([0, [1]], 0), ([6, [1, 3, 4]], 2)),
        "def solve(amount, coins):\n"
        "    fewest = [0] + [amount + 1] * amount\n"
        "    for total in range(1, amount + 1):\n"
        "        for coin in coins:\n"
        "            if coin <= total:\n"
        "                fewest[total] = min(fewest[total], fewest[total - coin] + 1)\n"
        "    return fewest[amount] if fewest[amount] <= amount else -1\n",
    ),
    Problem(
        "spiral",
        "solve(rows) returns the values of a matrix in clockwise spiral order from the top left.",
        (
            ([[[1, 2, 3], [4, 5, 6], [7, 8, 9]]], [1, 2, 3, 6, 9, 8, 7, 4, 5]),
            ([[[1, 2], [3, 4]]], [1, 2, 4, 3]),
            ([[[1], [2]]], [1, 2]),
            ([[]], []),
        ),
        "def solve(rows):\n"
        "    values = []\n"
        "    while rows:\n"
        "        values += rows[0]\n"
        "        rows = [list(column) for column in zip(*rows[1:])][::-1]\n"
        "    return values\n",
    ),
    Problem(
        "most-common",
        "solve(words) returns the most frequent word; of several the first in the alphabet.",
        (
            ([["b", "a", "b"]], "b"),
            ([["x"]], "x"),
            ([["b", "a"]], "a"),
            ([["c", "a", "c", "a"]], "a"),
        ),
        "from collections import Counter\n"
        "def solve(words):\n"
        "    return min(Counter(words).items(), key=lambda pair: (-pair[1], pair[0]))[0]\n",
    ),
)
