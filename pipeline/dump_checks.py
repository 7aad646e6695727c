"""The list of checks that a raw dump goes through, in the order in which they are judged: faults, thresholds, reasons.

Only data; `validator` looks and judges. A verdict is `ok`, `warn` or `refuse`; a check that has nothing to look at is
`not_applicable`, one that another's refusal came before is `not_reached`.
"""

from dataclasses import dataclass

WARMUP_ROWS = 16
"""Shortest leading block of one identical row, in all layers, that counts as the engine's warm-up (published ones
run from 2,048 to 16,640 rows; no sound dump at hand starts with more than one)."""

FROZEN_ROWS = 16
"""Identical rows in a row, in every layer, from which on padding or a replayed graph is always named."""

FROZEN_LAYERS = 16
"""Layers from which on a token that repeats the one before in all of them is rare enough to be looked at sooner: none
of the 16,428 tokens of the published dumps at hand does so (16 and 48 layers). A toy of 8 layers does wherever a
character follows itself, in runs of 12 and with equal weights."""

FROZEN_SETS = 1000
"""Sets of k experts to choose from, from which on the same is true."""

FROZEN_ROWS_NAMED = 3
"""Identical rows in a row in so many layers from which on they are named."""

FROZEN_ROWS_REFUSED = 8
"""The same from which on they are refused, unless the user says that the model repeats a token; in fewer layers they
are named if the dump has no other repetition."""

FROZEN_LAYER_ROWS = 64
"""The same within one layer, where chance reaches further."""

CONSTANT_ROWS = 16
"""Rows from which on a layer that never changes is refused: an unwritten buffer, not a popular expert."""

IDENTICAL_ROWS = 32
"""Rows from which on two layers with equal routes are refused as copies; below it they are only named."""

COPY_SHARE = 0.99
"""Share of equal rows, among those in which they change, from which on two layers are one and its copy; one odd row
is always allowed."""

SIMILAR_SHARE = 0.9
"""The same from which on they are named."""

COPY_SHIFT = 2
"""Rows by which a copy may be shifted."""

COMPARED_SETS = 2**21
"""Rows, of all layers together, from the start of the dump that are held against each other: 16 MiB of digests."""

SPARE_SHARE = 0.25
"""Share of the declared experts, from the highest id down, that no layer chooses, from which on it is looked at."""

SPARE_SELECTIONS = 1000
"""Selections of those that a balanced router would have made, from which on their absence is named: with a hundredth of
its share, ten are expected, and none has a chance of 5 in 100,000."""

PARTITION_CHANCE = 0.01
"""Expected chance windows up to which one window that partitions the experts is evidence of a strided-view copy."""

SHORT_WINDOW_CHANCE = 1e-4
"""The same for a window that is shorter than a whole partition, as a copy of passes shorter than E ÷ k tokens shows."""

PADDING_TOKENS = 4
"""Tokens at the edges of requests whose ids are consecutive in every layer, from which on they are padding."""

PADDING_CHANCE = 0.01
"""Expected such tokens by chance up to which they are evidence."""

REPEATED_PASS_ROWS = 16
"""Rows of a pass, over its layers, from which on its repetition is no chance even for a router that likes to repeat."""

REPEATED_RUNS = 8
"""Runs of equal passes from which on a repetition of most of them is a copy."""

COLLAPSE_SHARE = 0.9
"""Share of a layer's selections on its k most selected experts from which on a collapse is named; it can be real."""

SUM_TOLERANCE = 0.02
"""By how much a row's weights may miss the sum of their kind: each of up to a few dozen bfloat16 is off by 2⁻⁹."""

IDENTITY = "known layout"


@dataclass(frozen=True)
class Check:
    """One check: what fault it looks for, what a sound dump shows, and why the line is drawn there."""

    name: str
    looks_for: str
    wanted: str
    reason: str


CHECKS: tuple[Check, ...] = (
    Check(
        IDENTITY,
        "counts, hot lists, masks, pointers, pickles, elided text, truncated or damaged files",
        "the routes of tokens in a known layout, whole",
        "the content decides, never the name: published files lie about what they hold",
    ),
    Check(
        "expert ids in range",
        "ids counted from 1, negative marks, fused shared or zero-compute experts, ids that wrapped, k taken for E, "
        "an E of another model",
        f"0 ≤ id < num_experts, in a type that holds them all; the upper {SPARE_SHARE:.0%} of the ids are chosen, too",
        "an id outside names no routed expert, and a clamped one would name the wrong one; ids that no layer chooses "
        f"are named where a balanced router would have chosen them {SPARE_SELECTIONS:,} times",
    ),
    Check(
        "255 is an expert",
        "−1 stored in 8 bits, where it reads 255",
        "no id 255 in 8 bits, unless it is an expert",
        "with 256 experts the two cannot be told apart, so it is only named",
    ),
    Check(
        "no expert twice in a row",
        "counts, fused shared experts, padding among the ids, one token's ids written over another's",
        "k different ids per token and layer",
        "a top-k never picks an expert twice",
    ),
    Check(
        "shared experts apart",
        "a fused shared expert: one id that stands in every row of every layer",
        f"no id in all rows of all layers, from {CONSTANT_ROWS} rows a layer on",
        "a router that balances leaves some expert out of some row; the highest ids are where engines fuse shared ones",
    ),
    Check(
        "no strided-view copy",
        "the flat copy of a strided top-k view: rows that are a permutation of the experts, cut at k",
        "no E ÷ k rows of a layer in a row without a repeated id, or fewer where chance allows it",
        f"real routers repeat: at most {PARTITION_CHANCE} such windows are expected by chance, so one is evidence",
    ),
    Check(
        "no constant layer",
        "unwritten buffers: layers of zeros, or that never change; the shard of one rank in a padded buffer",
        f"no row of zeros (k > 1), and a layer changes within {CONSTANT_ROWS} rows",
        "no router of the published traces keeps a set that long in one layer from the first row to the last",
    ),
    Check(
        "layers differ",
        "one layer's routes written as another's, whole, but for few rows, or shifted",
        f"no two layers with the same sets over {IDENTICAL_ROWS} rows, or in {COPY_SHARE:.0%} of those in which they "
        f"change, up to {COPY_SHIFT} rows apart",
        "equal sets in every row have no chance to arise, unless the model ties its routers; few rows, or "
        f"{SIMILAR_SHARE:.0%} of them, are only named",
    ),
    Check(
        "no warm-up rows",
        "the engine's dummy batches at the start",
        f"fewer than {WARMUP_ROWS} identical rows at the start, in all layers",
        "published warm-up blocks run from 2,048 to 16,640 rows, sound dumps start with one",
    ),
    Check(
        "no padding rows",
        "padding filled with 0..k−1 or with a running number modulo E",
        f"fewer than {PADDING_TOKENS} tokens with consecutive ids in every layer, at the edges of requests or inside",
        f"evidence where at most {PADDING_CHANCE} such tokens are expected by chance; cut by length, never by value",
    ),
    Check(
        "every pass has every layer",
        "truncation, a layer not captured, two streams in one file, layers out of order",
        "equally many rows in every layer of a pass; the last layer of a prefill may have fewer",
        "engines compute the last layer only for the tokens whose output they need; no other hole has a reason",
    ),
    Check(
        "rows conserved",
        "layers counted several times, or in part",
        "rows × k selections, equally many in every layer",
        "every token passes every layer once; only a pruned last layer and cut speculation take from it",
    ),
    Check(
        "no pass twice",
        "passes recorded by several ranks and joined, nodes that ran twice",
        "a pass differs from the one before it",
        f"asked without token positions and from {REPEATED_PASS_ROWS} rows per pass on, where a repetition of most of "
        f"{REPEATED_RUNS} passes is no chance",
    ),
    Check(
        "weights agree",
        "weights of other ids, of another kind than said, or ids that lost their order",
        f"weights fall along a row and fit their kind (sums within {SUM_TOLERANCE})",
        "routers with a correction bias choose by other scores, so a row may rise: it is only named",
    ),
    Check(
        "positions continuous",
        "lost tokens, restarts, several sequences in one request, tokens recorded twice",
        "token positions of a request go up by one",
        "a gap may be a cached prefix, a restart the next sequence; the same position at once again is a copy",
    ),
    Check(
        "no frozen rows",
        "a replayed graph that writes one token's routes again, padding with one row",
        f"fewer than {FROZEN_ROWS_NAMED} identical rows in a row in all of {FROZEN_LAYERS} or more layers, "
        f"{FROZEN_ROWS} in all of fewer, {FROZEN_LAYER_ROWS} in one",
        f"deep models do not repeat a token's routes in every layer: from {FROZEN_ROWS_REFUSED} rows on it is refused, "
        "unless shorter runs are the many, or the user says that the model repeats a token; in fewer layers so many "
        "are named where nothing else repeats",
    ),
    Check(
        "ids are logical",
        "physical ids of replicated experts, ids local to a rank, slots of a cache",
        "global, logical ids",
        "one expert would have several names, or several experts one; without the map of each pass nothing tells them",
    ),
    Check(
        "no routing collapse",
        "dummy routes, a broken router",
        f"a layer's k most selected experts carry at most {COLLAPSE_SHARE:.0%} of its selections",
        "small models do collapse, so it is only named",
    ),
    Check(
        "router order kept",
        "ids that were sorted, so that their order says nothing",
        "ids of a row in router order",
        "an order in which every row ascends is no router's",
    ),
    Check(
        "k is the model's",
        "an override of the engine, padding to a fixed width, fused shared experts",
        "as many experts per token as the model's configuration says",
        "an override is legitimate, so it is only named",
    ),
    Check(
        "layers are numbered",
        "list positions taken for layer numbers, where dense layers shift them",
        "the model's number of every layer",
        "with fewer lists than layers nobody can tell which they are",
    ),
    Check(
        "rows dropped",
        "rows of the dump that are not in the trace",
        "every route of the dump is in the trace",
        "missing is never expert 0, and never silent",
    ),
    Check(
        "positions captured",
        "cached prefixes, preempted requests",
        "routes of every token position",
        "holes stay holes",
    ),
    Check(
        "speculation typed",
        "passes that are neither accepted, rejected, nor a fallback",
        "every pass is normal, accepted, rejected or a fallback by width and repetition",
        "2608.12103 §2: the widths and repetitions of records say what a pass was for",
    ),
    Check(
        "k of the records",
        "records that hold two tokens, taken for one",
        "k is said (top_k_model), or records of k and of 2k ids show it",
        "records of one width fit both",
    ),
    Check(
        "what is said fits",
        "metadata of another dump or model",
        "what the user says of the dump agrees with it",
        "a contradiction is a mistake of one of both",
    ),
    Check(
        "repaired as asked",
        "changes that the user named",
        "nothing is changed",
        "no repair is silent: each is declared, counted, and part of the trace's identity",
    ),
)
"""In the order in which they are judged."""

ORDER = {check.name: place for place, check in enumerate(CHECKS)}


def listed() -> str:
    """The list for a README, as a table in Markdown."""
    lines = ["| check | looks for | a sound dump shows | why there |", "|---|---|---|---|"]
    lines += [f"| {one.name} | {one.looks_for} | {one.wanted} | {one.reason} |" for one in CHECKS]
    return "\n".join(lines)
