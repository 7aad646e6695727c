"""What a user declares of a dump's rows, carried out: ids counted from 1, fused shared experts, padding, warm-up.

Nothing is repaired unless it is named (a key of `UserMetadata`, or its flag on the command line), and each repair is
counted. No repair looks for what it removes: it is told, and refuses a dump that does not fit what it was told.
Letters: R rows of a block, K ids per row as recorded.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.dumps.blocks import MalformedDump, RowBlock
from schemas.trace import UserMetadata


@dataclass
class Repairs:
    """The repairs a user asked for, and what they changed so far.

    num_experts: E as declared, null if nobody says it. moved_rows and stripped_rows were changed, dropped_rows are left
    out, by reason.
    """

    path: Path
    user: UserMetadata
    num_experts: int | None
    moved_rows: int = 0
    stripped_rows: int = 0
    dropped_rows: dict[str, int] = field(default_factory=dict)
    _tokens: dict[int, int] = field(default_factory=dict)
    _steps: int = 0

    def apply(self, block: RowBlock) -> RowBlock:
        """The block as declared; its steps stay dense. It may have no row left.

        Raises:
            MalformedDump: the rows do not fit what is declared.
        """
        if self.user.expert_id_base:
            self.moved_rows += block.rows
            block = replace(block, expert_ids=block.expert_ids - self.user.expert_id_base)
        if self.user.shared_experts is not None:
            block = self._without_shared(block, self.user.shared_experts)
        if self.user.sequence_lengths is not None:
            block = self._without_padding(block, self.user.sequence_lengths)
        return block

    def without_warmup(self, block: RowBlock, rows: int) -> RowBlock:
        """The block without its first `rows`, the engine's warm-up, if the user asked for that; else as it is."""
        if self.user.drop_warmup and rows:
            self._count("warm-up, as you say (drop_warmup)", rows)
            keep = np.arange(block.rows) >= rows
            block = _kept(block, keep)
        return self._dense(block)

    def check_lengths(self) -> None:
        """Raises MalformedDump if the lengths that the user says are those of other requests than the dump's."""
        lengths = self.user.sequence_lengths
        if lengths is None:
            return
        if not any(lengths):
            raise MalformedDump(
                f"{self.path}: you say sequence_lengths {str(lengths)[:80]}, which leave no token; say the tokens of "
                "each request",
                check="no padding rows",
            )
        # Engines never run the last token, so a length may be one more than the rows.
        over = [request for request, tokens in self._tokens.items() if lengths[request] > tokens + 1]
        if len(self._tokens) != len(lengths) or over:
            what = f"request {over[0]} has {self._tokens[over[0]]} tokens" if over else f"{len(self._tokens)} requests"
            raise MalformedDump(
                f"{self.path}: {what}, but you say sequence_lengths {str(lengths)[:80]}; say the tokens of each "
                "request",
                check="no padding rows",
            )

    @property
    def changed_rows(self) -> bool:
        """Whether rows or ids are others than the dump's; the name of a layer is none of them."""
        return bool(self.moved_rows or self.stripped_rows or any(self.dropped_rows.values()))

    @property
    def found(self) -> str | None:
        """What was changed, for a person; null if nothing."""
        said = []
        if self.moved_rows:
            said.append(f"ids of {self.moved_rows} rows counted from 0 instead of {self.user.expert_id_base}")
        if self.user.moe_layer_ids is not None:
            said.append("layers numbered as you say")
        if self.stripped_rows:
            said.append(f"{self.user.shared_experts} shared experts left out of {self.stripped_rows} rows")
        said += [f"{rows} rows dropped: {reason}" for reason, rows in self.dropped_rows.items()]
        return "; ".join(said) or None

    def _count(self, reason: str, rows: int) -> None:
        self.dropped_rows[reason] = self.dropped_rows.get(reason, 0) + rows

    def _without_shared(self, block: RowBlock, shared: int) -> RowBlock:
        """Rows of K − shared ids: each must hold exactly `shared` of the ids E..E + shared − 1."""
        if self.num_experts is None:
            raise MalformedDump(
                f"{self.path}: you say shared_experts = {shared}, but nobody says how many routed experts there are; "
                "say --meta num_experts=E",
                check="expert ids in range",
            )
        routed = block.expert_ids < self.num_experts  # (R, K)
        wrong = routed.sum(axis=1) != block.expert_ids.shape[1] - shared
        if wrong.any():
            row = int(np.flatnonzero(wrong)[0])
            raise MalformedDump(
                f"{self.path}, step {int(block.step[row])}, layer {int(block.layer[row])}: ids "
                f"{block.expert_ids[row].tolist()}, but you say that {shared} shared experts stand in every row as ids "
                f"{self.num_experts}..{self.num_experts + shared - 1}; correct shared_experts or num_experts",
                check="expert ids in range",
            )
        self.stripped_rows += block.rows
        weights = None if block.weights is None else block.weights[routed].reshape(block.rows, -1)
        return replace(block, expert_ids=block.expert_ids[routed].reshape(block.rows, -1), weights=weights)

    def _without_padding(self, block: RowBlock, lengths: list[int]) -> RowBlock:
        if block.position is None:
            raise MalformedDump(
                f"{self.path}: you say sequence_lengths, but the dump has no token positions to cut by; cut the "
                "padding where it is recorded",
                check="no padding rows",
            )
        beyond = block.request[(block.request < 0) | (block.request >= len(lengths))]
        if len(beyond):
            raise MalformedDump(
                f"{self.path}: request {int(beyond[0])}, but you say {len(lengths)} sequence_lengths (requests count "
                "from 0); say one for each",
                check="no padding rows",
            )
        for request in np.unique(block.request).tolist():
            tokens = int(block.position[block.request == request].max()) + 1
            self._tokens[request] = max(self._tokens.get(request, 0), tokens)
        keep = block.position < np.asarray(lengths, dtype=np.int64)[block.request]
        if not keep.all():
            self._count("padding beyond the length you say (sequence_lengths)", int((~keep).sum()))
            block = _kept(block, keep)
        return block

    def _dense(self, block: RowBlock) -> RowBlock:
        if not self.dropped_rows and block.rows and int(block.step[0]) == self._steps:
            self._steps = int(block.step[-1]) + 1
            return block
        numbers, step = np.unique(block.step, return_inverse=True)
        block = replace(block, step=self._steps + step.astype(np.int64))
        self._steps += len(numbers)
        return block


def _kept(block: RowBlock, keep: npt.NDArray[np.bool_]) -> RowBlock:
    return RowBlock(
        step=block.step[keep],
        pass_in_step=block.pass_in_step[keep],
        layer=block.layer[keep],
        request=block.request[keep],
        position=None if block.position is None else block.position[keep],
        phase=block.phase[keep],
        expert_ids=block.expert_ids[keep],
        weights=None if block.weights is None else block.weights[keep],
        pass_kind=None if block.pass_kind is None else block.pass_kind[keep],
        predicted=None if block.predicted is None else block.predicted.filter(pa.array(keep)),
    )
