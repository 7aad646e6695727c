"""Routes stored sequence by sequence, [tokens, layers, k], as blocks of rows: one step per token position.

For engines that return what a finished request was routed to: which tokens ran together is not in such a dump.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipeline.dumps.blocks import ROWS_PER_BLOCK, RowBlock
from schemas.trace import PHASE_CODES


@dataclass
class Sequences:
    """Turns one sequence after the other into blocks; counts steps on.

    layers: the number of each entry of the layer axis, as the dump numbers it, ascending.
    """

    layers: Sequence[int]
    steps: int = 0
    _numbers: npt.NDArray[np.int32] = field(init=False)

    def __post_init__(self) -> None:
        self._numbers = np.asarray(self.layers, dtype=np.int32)

    def blocks(
        self,
        ids: npt.NDArray[np.int32],
        *,
        request: int,
        positions: npt.NDArray[np.int64] | None,
        prompt_tokens: int | None = None,
        weights: npt.NDArray[np.float32] | None = None,
    ) -> Iterator[RowBlock]:
        """Blocks of one sequence.

        ids: (T, L, K). positions: (T,) places in the sequence, null if the dump does not say. prompt_tokens: positions
        below it are prefill, the others decode; null leaves the phase unknown. weights: (T, L, K), NaN where unknown.
        """
        tokens, layers, top_k = ids.shape
        per_block = max(1, ROWS_PER_BLOCK // max(layers, 1))
        for begin in range(0, tokens, per_block):
            end = min(begin + per_block, tokens)
            rows = (end - begin) * layers
            place = None if positions is None else np.repeat(positions[begin:end], layers)
            if prompt_tokens is None or place is None:
                phase = np.full(rows, PHASE_CODES["unknown"], dtype=np.int8)
            else:
                phase = np.where(place < prompt_tokens, PHASE_CODES["prefill"], PHASE_CODES["decode"]).astype(np.int8)
            yield RowBlock(
                step=np.repeat(np.arange(self.steps, self.steps + end - begin), layers),
                pass_in_step=np.zeros(rows, dtype=np.int32),
                layer=np.tile(self._numbers, end - begin),
                request=np.full(rows, request, dtype=np.int64),
                position=place,
                phase=phase,
                expert_ids=np.ascontiguousarray(ids[begin:end], dtype=np.int32).reshape(rows, top_k),
                weights=None
                if weights is None
                else np.ascontiguousarray(weights[begin:end], dtype=np.float32).reshape(rows, top_k),
            )
            self.steps += end - begin
