"""What a check has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `headrace doctor`."""

    check: str
    """What was looked at, in one or two words."""
    state: State
    """`problem`: a run can't work like this. `warning`: it may not, or soon will not."""
    text: str
    help: str = ""
    """What to do. Empty if all is well."""

    def line(self) -> str:
        """Returns the finding as text."""
        to_do = f". {self.help}" if self.help else ""
        return f"  {self.state:<8} {self.check:<13} {self.text}{to_do}"
