"""A small set of repositories to mend, with hidden tests, for the tool `repair` of sandboxes.

A task's solution is here to prove that it can be mended; it is no part of what a task says.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.services.tasks.task_maker import Item


@dataclass(frozen=True, slots=True)
class Repository:
    """Files with something wrong in them, what is reported of it, and what shows it mended."""

    name: str
    report: str
    files: Mapping[str, str]
    tests: tuple[tuple[str, list[Any], Any], ...]
    """`module:function`, arguments and value, as JSON."""
    solution: str
    """A shell command that mends it."""


def items() -> Iterator[Item]:
    """All repositories, in order. Their solutions stay here."""
    for one in REPOSITORIES:
        tests = [list(test) for test in one.tests]
        yield Item(one.name, {"prompt": one.report, "files": dict(one.files), "tests": tests})


CART = """from shop.prices import price_of


def total(items):
    \"\"\"Cents of all items, by name and count; ten of a kind cost as much as nine.\"\"\"
    cents = 0
    for name, count in items.items():
        paid = count - 1 if count >= 10 else count
        cents += paid * price_of(name)
    return cents
"""
PRICES = """PRICES = {"apple": 50, "bread": 320, "milk": 129}


def price_of(name):
    return PRICES[name]
"""
READER = """def read(text):
    \"\"\"Rows of a table: fields separated by commas; a quoted field may hold some.\"\"\"
    return [line.split(",") for line in text.splitlines()]
"""
CALENDAR = """DAYS = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31]


def is_leap(year):
    return year % 4 == 0


def days_in(year, month):
    return 29 if month == 2 and is_leap(year) else DAYS[month - 1]
"""
AGE = """from dates.calendar import days_in


def day_of_year(year, month, day):
    return sum(days_in(year, earlier) for earlier in range(1, month)) + day
"""
CACHE = """class Cache:
    \"\"\"Keeps the entries used last, at most `size` of them.\"\"\"

    def __init__(self, size):
        self.size = size
        self.entries = {}

    def get(self, key):
        return self.entries.get(key)

    def put(self, key, value):
        self.entries[key] = value
        if len(self.entries) > self.size:
            del self.entries[next(iter(self.entries))]
"""
PLAY = """from cache.lru import Cache


def play(size, moves):
    \"\"\"What `get` gives, move after move: [key] gets, [key, value] puts.\"\"\"
    cache, seen = Cache(size), []
    for move in moves:
        if len(move) == 2:
            cache.put(*move)
        else:
            seen.append(cache.get(*move))
    return seen
"""
GRAPH = """def order(needs):
    \"\"\"Names in an order in which each comes after all that it needs, else by the alphabet.\"\"\"
    done = []

    def visit(name):
        for other in needs.get(name, []):
            visit(other)
        done.append(name)

    for name in needs:
        visit(name)
    return done
"""
SETTINGS = """DEFAULTS = {"colour": "blue", "sizes": [1, 2]}


def load(changes):
    settings = DEFAULTS
    settings.update(changes)
    return settings


def load_all(several):
    return [dict(load(changes)) for changes in several]
"""

REPOSITORIES = (
    Repository(
        "cart-discount",
        "shop.cart.total gives one item free from ten of a kind on, but the rule is one free for "
        "every full ten: twenty apples must cost as much as eighteen.",
        {"shop/__init__.py": "", "shop/cart.py": CART, "shop/prices.py": PRICES},
        (
            ("shop.cart:total", [{"apple": 20}], 900),
            ("shop.cart:total", [{"apple": 9, "milk": 10}], 1611),
            ("shop.cart:total", [{}], 0),
            ("shop.cart:total", [{"bread": 35}], 10240),
        ),
        "sed -i 's/paid = .*/paid = count - count \\/\\/ 10/' shop/cart.py",
    ),
    Repository(
        "quoted-fields",
        "table.reader.read splits quoted fields at their commas. A field in double quotes is one "
        "field without the quotes, and two double quotes in it stand for one.",
        {"table/__init__.py": "", "table/reader.py": READER},
        (
            ("table.reader:read", ['a,"b,c",d'], [["a", "b,c", "d"]]),
            ("table.reader:read", ["1,2\n3,4"], [["1", "2"], ["3", "4"]]),
            ("table.reader:read", ['"say ""hi""",x'], [['say "hi"', "x"]]),
            ("table.reader:read", [""], []),
        ),
        "printf 'import csv\\n\\n\\ndef read(text):\\n    return list(csv.reader("
        "text.splitlines()))\\n' > table/reader.py",
    ),
    Repository(
        "leap-years",
        "dates.age.day_of_year is one too high from March 1900 on in that year, and in 2100. The "
        "years that end a century are leap years only where 400 divides them.",
        {"dates/__init__.py": "", "dates/calendar.py": CALENDAR, "dates/age.py": AGE},
        (
            ("dates.age:day_of_year", [1900, 3, 1], 60),
            ("dates.age:day_of_year", [2000, 3, 1], 61),
            ("dates.age:day_of_year", [2024, 12, 31], 366),
            ("dates.age:day_of_year", [2023, 12, 31], 365),
            ("dates.calendar:is_leap", [2100], False),
        ),
        "sed -i 's/return year % 4 == 0/return year % 4 == 0 and (year % 100 != 0 or "
        "year % 400 == 0)/' dates/calendar.py",
    ),
    Repository(
        "forgetful-cache",
        "cache.lru.Cache drops the entry that was put first, though its docstring says that those "
        "used last are kept. Getting an entry is using it, and so is putting it again.",
        {"cache/__init__.py": "", "cache/lru.py": CACHE, "cache/play.py": PLAY},
        (
            (
                "cache.play:play",
                [2, [["a", 1], ["b", 2], ["a"], ["c", 3], ["a"], ["b"]]],
                [1, 1, None],
            ),
            ("cache.play:play", [2, [["a", 1], ["b", 2], ["a", 3], ["c", 4], ["a"]]], [3]),
            ("cache.play:play", [1, [["x"], ["x", 5], ["x"]]], [None, 5]),
        ),
        "sed -i -e 's/        return self.entries.get(key)/        if key in self.entries:\\n"
        "            self.entries[key] = self.entries.pop(key)\\n&/' "
        "-e 's/        self.entries\\[key\\] = value/        self.entries.pop(key, None)\\n&/' "
        "cache/lru.py",
    ),
    Repository(
        "build-order",
        "build.graph.order names things twice where two need the same, keeps the order of the "
        "input where the alphabet should decide, and never ends on a circle: it should return null "
        "(None) there.",
        {"build/__init__.py": "", "build/graph.py": GRAPH},
        (
            ("build.graph:order", [{"b": ["c"], "a": ["c"]}], ["c", "a", "b"]),
            ("build.graph:order", [{"x": ["y"], "y": ["x"]}], None),
            ("build.graph:order", [{}], []),
            ("build.graph:order", [{"b": [], "a": []}], ["a", "b"]),
            ("build.graph:order", [{"z": ["m", "k"]}], ["k", "m", "z"]),
        ),
        "cat > build/graph.py <<'END'\n"
        "def order(needs):\n"
        "    done, open_ = [], set()\n"
        "\n"
        "    def visit(name):\n"
        "        if name in open_:\n"
        "            return False\n"
        "        if name in done:\n"
        "            return True\n"
        "        open_.add(name)\n"
        "        fine = all(visit(other) for other in sorted(needs.get(name, [])))\n"
        "        open_.discard(name)\n"
        "        done.append(name)\n"
        "        return fine\n"
        "\n"
        "    return done if all(visit(name) for name in sorted(needs)) else None\n"
        "END",
    ),
    Repository(
        "shared-defaults",
        "conf.settings.load remembers the changes of earlier calls: what one caller sets, the next "
        "one gets. Each call must begin from the defaults, and change none of them.",
        {"conf/__init__.py": "", "conf/settings.py": SETTINGS},
        (
            (
                "conf.settings:load_all",
                [[{"colour": "red"}, {}]],
                [{"colour": "red", "sizes": [1, 2]}, {"colour": "blue", "sizes": [1, 2]}],
            ),
            (
                "conf.settings:load_all",
                [[{"size": 3}, {"sizes": []}]],
                [{"colour": "blue", "sizes": [1, 2], "size": 3}, {"colour": "blue", "sizes": []}],
            ),
        ),
        "sed -i 's/settings = DEFAULTS/settings = dict(DEFAULTS)/' conf/settings.py",
    ),
)
