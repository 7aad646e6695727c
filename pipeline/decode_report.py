"""The report's answer to what a decode gains: tokens a second of each owner, and balanced pairs of two owners.

Of the views `decode_summary` and `decode_pair_ratio` and the table `decode_layer`; nothing is computed here but words.
"""

from collections.abc import Mapping, Sequence

import polars as pl

from pipeline.page import Block, Cell, Grid, Row, amount, listed, plural, sized

PAIR_VIEW, SUMMARY_VIEW = VIEWS = ("decode_pair_ratio", "decode_summary")

_SUMMARY_QUERY = f"SELECT * FROM {SUMMARY_VIEW}"  # noqa: S608 - our own name
_PAIR_QUERY = f"SELECT * FROM {PAIR_VIEW}"  # noqa: S608 - our own name
_LAYER_QUERY = (
    "SELECT owner, layer_id, sum(layer_wait_ns) AS wait_ns, sum(layer_compute_ns) AS compute_ns, "
    "sum(decode_passes) AS passes FROM decode_layer JOIN decode_run USING (run_id) "
    "WHERE decode_phase = 'decode' AND bytes_valid AND time_valid AND NOT degenerate GROUP BY ALL ORDER BY ALL"
)


def decode_blocks(tables: Mapping[str, pl.DataFrame]) -> list[Block]:
    """One block for all decodes; nothing without any. tables: `decode_run`, `decode_layer` and the two `VIEWS`."""
    if not all(name in tables for name in VIEWS):
        return []
    summary, pairs = tables[SUMMARY_VIEW].to_dicts(), tables[PAIR_VIEW].to_dicts()
    if not summary and not pairs:
        return []
    layers = _layers(tables["decode_run"], tables["decode_layer"])
    grids = [_summary_grid(summary)] if summary else []
    grids += [_pair_grid(pairs)] if pairs else []
    grids += [_layer_grid(layers)] if layers else []
    findings = [_pair_sentence(row) for row in pairs] or ["No two owners were decoded in balanced pairs."]
    return [
        Block(
            heading="How fast does a model decode with its experts through the tier?",
            findings=[*findings, *_summary_sentences(summary)],
            pictures=[],
            grids=grids,
        )
    ]


def _pair_sentence(row: Row) -> str:
    """What the pairs of one prompt say; a pair counts only if both sides decoded the same tokens."""
    where = f"{row['prompt_name']}, {amount(row['decoded_tokens'])} tokens of {row['model_folder']}"
    same = f"tokens are identical in {amount(row['identical_pairs'])} of {amount(row['pairs'])} pairs"
    if row["time_ratio_median"] is None:
        return f"{where}: {same}, and no pair says anything about time."
    low, middle, high = row["time_ratio_low"], row["time_ratio_median"], row["time_ratio_high"]
    spread = f"{middle:.2f} [{low:.2f}–{high:.2f}] in {amount(row['timed_pairs'])} timed pairs"
    if low > 1:
        return f"{where}: {same}; {row['owner']} is faster than {row['against']} by a factor of {spread}."
    if high < 1:
        return f"{where}: {same}; {row['owner']} is slower than {row['against']}, whose time is {spread} of its own."
    return f"{where}: {same}; which of {row['owner']} and {row['against']} is faster is open: {spread}."


def _summary_sentences(rows: Sequence[Row]) -> list[str]:
    """What spoils the rows: other tokens under the same conditions, and runs without valid times."""
    found = []
    unlike = [row for row in rows if row["distinct_outputs"] > 1]
    if unlike:
        names = listed(sorted({f"{row['owner']} on {row['prompt_name']}" for row in unlike}))
        found.append(f"Repetitions decoded different tokens with {names}: what was read, or computed, differs.")
    runs, timed = sum(row["runs"] for row in rows), sum(row["timed_runs"] for row in rows)
    if timed < runs:
        left = runs - timed
        found.append(
            f"{amount(left)} of {amount(runs)} {plural('decode', runs)} {'has' if left == 1 else 'have'} no time to be "
            "believed, and no place among the tokens a second."
        )
    return found


def _layers(runs: pl.DataFrame, layers: pl.DataFrame) -> list[Row]:
    """owner, layer_id, wait_ns and compute_ns summed over the passes of valid, timed decodes."""
    good = runs.filter(pl.col("bytes_valid") & pl.col("time_valid") & ~pl.col("degenerate"))
    return (
        layers.filter(pl.col("decode_phase") == "decode")
        .join(good.select("run_id", "owner", "decode_passes"), on="run_id")
        .group_by("owner", "layer_id")
        .agg(
            wait_ns=pl.col("layer_wait_ns").sum(),
            compute_ns=pl.col("layer_compute_ns").sum(),
            passes=pl.col("decode_passes").sum(),
        )
        .sort("owner", "layer_id")
        .to_dicts()
    )


def _heads(*texts: str) -> list[list[Cell]]:
    return [[Cell(text) for text in texts]]


def _summary_grid(rows: Sequence[Row]) -> Grid:
    return Grid(
        caption="Tokens a second after the first, medians over repetitions with valid times, and their range.",
        head=_heads("Prompt", "Owner", "Capacity", "Tokens a second", "Waiting", "First token", "From the device"),
        rows=[
            [
                Cell(row["prompt_name"], is_text=True),
                Cell(row["owner"], note=row["mechanism"], is_text=True),
                Cell("no limit" if row["capacity_bytes"] is None else sized(row["capacity_bytes"])),
                _rate(row),
                _milliseconds(row["decode_wait_median_ns"], f"of {_in_ms(row['decode_median_ns'])}"),
                _milliseconds(row["first_token_median_ns"]),
                Cell(sized(row["device_median_bytes"]), note=f"of {sized(row['demand_bytes'])} asked for"),
            ]
            for row in rows
        ],
        query=_SUMMARY_QUERY,
    )


def _rate(row: Row) -> Cell:
    counts = f"{amount(row['timed_runs'])} of {amount(row['runs'])} {plural('run', row['runs'])}"
    if row["tokens_per_s"] is None:
        return Cell("—", note=counts)
    return Cell(
        f"{row['tokens_per_s']:,.2f}",
        note=f"{row['tokens_per_s_low']:,.2f}–{row['tokens_per_s_high']:,.2f}, {counts}",
    )


def _pair_grid(rows: Sequence[Row]) -> Grid:
    return Grid(
        caption="Time of the second owner ÷ time of the first, in balanced pairs that decoded the same tokens.",
        head=_heads("Prompt", "Owner", "Against", "Ratio", "First's time", "Second's time", "Pairs"),
        rows=[
            [
                Cell(row["prompt_name"], is_text=True),
                Cell(row["owner"], is_text=True),
                Cell(row["against"], is_text=True),
                Cell("—")
                if row["time_ratio_median"] is None
                else Cell(
                    f"{row['time_ratio_median']:.3f}", note=f"{row['time_ratio_low']:.3f}–{row['time_ratio_high']:.3f}"
                ),
                _milliseconds(row["owner_decode_median_ns"]),
                _milliseconds(row["against_decode_median_ns"]),
                Cell(
                    f"{amount(row['timed_pairs'])} of {amount(row['pairs'])}",
                    note=f"{amount(row['identical_pairs'])} identical, {amount(row['void_pairs'])} void",
                ),
            ]
            for row in rows
        ],
        query=_PAIR_QUERY,
    )


def _layer_grid(rows: Sequence[Row]) -> Grid:
    return Grid(
        caption="Where the time of a token went, layer by layer; computing is attention, router and experts.",
        head=_heads("Owner", "Layer", "Waited a token", "Computed a token"),
        rows=[
            [
                Cell(row["owner"], is_text=True),
                Cell(str(row["layer_id"])),
                _milliseconds(row["wait_ns"] / row["passes"]),
                _milliseconds(row["compute_ns"] / row["passes"]),
            ]
            for row in rows
        ],
        summary="Time by layer",
        query=_LAYER_QUERY,
    )


def _milliseconds(duration_ns: float | None, note: str = "") -> Cell:
    return Cell(_in_ms(duration_ns), note=note if duration_ns is not None else "")


def _in_ms(duration_ns: float | None) -> str:
    return "—" if duration_ns is None else f"{duration_ns / 1e6:,.2f}\N{NARROW NO-BREAK SPACE}ms"
