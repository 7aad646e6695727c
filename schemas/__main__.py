"""`python -m schemas` prints the data dictionary as Markdown, the way it stands in the README."""

import sys

import polars as pl

from schemas.columns import Column
from schemas.tables import FILE_TABLES, TABLES


def dictionary() -> str:
    """Every table with its grain and key, every column once where it first occurs."""
    described: set[str] = set()
    lines = []
    for table in [*TABLES.values(), *FILE_TABLES.values()]:
        lines += [f"#### `{table.name}`", "", f"{table.grain} Key: {', '.join(f'`{name}`' for name in table.key)}.", ""]
        fresh = [column for column in table.columns if column.name not in described]
        known = [column.name for column in table.columns if column.name in described]
        lines += ["| column | type | unit | meaning |", "|---|---|---|---|"]
        lines += [_row(column) for column in fresh]
        if known:
            lines += ["", f"And as above: {', '.join(f'`{name}`' for name in known)}."]
        lines.append("")
        described |= {column.name for column in fresh}
    return "\n".join(lines)


def _row(column: Column) -> str:
    types = {
        pl.String: "text",
        pl.Int64: "integer",
        pl.UInt32: "integer",
        pl.Float64: "real",
        pl.Boolean: "boolean",
    }
    values = f"; one of {', '.join(column.values)}" if column.values else ""
    return f"| `{column.name}` | {types[column.dtype]} | {column.unit or ''} | {column.description}{values} |"  # type: ignore[index]


if __name__ == "__main__":
    sys.stdout.write(dictionary())
