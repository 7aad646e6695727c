"""The ten questions in SQL of the README, and what it says is answered."""

import re
from pathlib import Path
from typing import NamedTuple

README = Path(__file__).parents[1] / "README.md"
SECTION = "## Ten questions in SQL"
MEASURED = "measured: "


class Question(NamedTuple):
    """A question's query, and its answer as printed; of what is measured only the columns."""

    sql: str
    answer: str | None
    columns: list[str] | None


def questions() -> list[Question]:
    """The section's questions in its order."""
    (text,) = re.findall(rf"^{SECTION}\n(.*?)^## ", README.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    pairs = re.findall(r"```sh\n\.venv/bin/expert-tier query \"([^\n]+)\"\n```\n\n```text\n(.*?)\n```", text, re.DOTALL)
    return [
        Question(sql, None, answer.removeprefix(MEASURED).split(", "))
        if answer.startswith(MEASURED)
        else Question(sql, answer, None)
        for sql, answer in pairs
    ]
