"""Decodes a model whose routed experts come through the tier: by the owners, the loop and the walls of a replay.

The spine and the arithmetic (`decoder`) are in this process; the experts are read by the measuring process inside the
limit, event by event, into slots that both see. What a decode leaves is accounted for, and proven, as the replay of
the routes it took; its own are the tokens, and where the time went. Command line and files do not belong here.

Letters: K experts per token, N events, U experts of an event.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from replayer.decoder import Decoded, Decoder
from replayer.owners import ReadPlan
from replayer.placement import Copied, CudaLane, adopted
from replayer.pool import Pool
from replayer.replay import Run, replay_as_asked
from replayer.request import Request, UnusableReplay
from replayer.seat import Asking
from replayer.trace import Trace
from schemas.trace import PHASE_CODES, SCHEMA_VERSION, TraceMetadata

SLOT_MEMORY_BYTES = 1 << 30
"""Of the slots of one event. A prompt is cut into passes whose experts fit."""

LEAST_TOKENS = 8
"""Fewer say nothing about repeating."""


@dataclass(frozen=True)
class DecodeRun:
    """One decode: `run` as of a replay; `decoded`: tokens and routes of the measured pass; times in ns.

    prefill_ns, decode_ns: passes over the prompt, and over the tokens after the first; and the parts of both that
    waited for experts. layers: rows of phase, layer_id, events, accesses, wait_ns, compute_ns (what led to the layer's
    experts, attention and router, and the experts themselves), lookahead_ns; what follows a pass's last layer is in
    none. warm_sha256, warm_up_ns: tokens and passes of the warm-up decode, which finds nothing in memory; null without.
    """

    run: Run
    decoded: Decoded
    trace: Trace
    prefill_ns: int
    prefill_wait_ns: int
    decode_ns: int
    decode_wait_ns: int
    layers: list[dict[str, Any]]
    warm_sha256: str | None
    warm_up_ns: int | None

    @property
    def degenerate(self) -> bool:
        """Whether one token stands in a row through half of the output or more: such routing is no text's."""
        ids = self.decoded.token_ids
        longest = max(len(list(same)) for _, same in itertools.groupby(ids))
        return len(ids) >= LEAST_TOKENS and 2 * longest >= len(ids)


@dataclass(frozen=True)
class Shape:
    """Where a tensor of an expert lies in a slot, and what it is."""

    part: str
    begin: int
    length: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class TierSource:
    """Experts from the slots of a seat: tensors over the bytes that were read there, not copies of them.

    With placement `copy` they are copied to the CUDA device as they are used, with `adopt` it reads them in place.
    """

    def __init__(
        self,
        asking: Asking,
        first_object: Mapping[int, int],
        shapes: Sequence[Sequence[Shape]],
        placement: str | None = None,
    ) -> None:
        self.asking, self.first_object, self.shapes = asking, first_object, shapes
        self._memory = torch.from_numpy(asking.seat.slots)
        self._lane = CudaLane(self._memory.shape[-1]) if placement == "copy" else None
        self._adopts = placement == "adopt"
        if self._adopts:
            self._memory = adopted(self._memory, torch.device("cuda"))

    def serve(self, layer_id: int, expert_ids: Sequence[int]) -> list[Mapping[str, torch.Tensor]]:
        """The experts' tensors, in the order asked for; valid until the next call.

        Raises:
            NotServed: the loop has ended.
        """
        objects = self.first_object[layer_id] + np.asarray(expert_ids, dtype=np.int64)
        if self._adopts:
            # The slots are read from until what was asked for before is computed.
            torch.cuda.current_stream().synchronize()
        self.asking.ask(objects)
        if self._lane is not None:
            slots = [
                self._memory[place, 0, : max(one.begin + one.length for one in self.shapes[obj])]
                for place, obj in enumerate(objects.tolist())
            ]
            tensors = [self.shapes[obj] for obj in objects.tolist()]
            return Copied(
                self._lane, slots, lambda place, whole: {one.part: _tensor(whole, one) for one in tensors[place]}
            ).experts()
        return [
            {one.part: _tensor(self._memory[place, 0], one) for one in self.shapes[obj]}
            for place, obj in enumerate(objects.tolist())
        ]


def _tensor(slot: torch.Tensor, one: Shape) -> torch.Tensor:
    part = slot[one.begin : one.begin + one.length]
    if one.begin % one.dtype.itemsize:
        # A view must begin at a multiple of its elements.
        part = part.clone()
    return part.view(one.dtype).view(one.shape)


def decode(
    decoder: Decoder,
    pool: Pool,
    request: Request,
    prompt_ids: Sequence[int],
    tokens: int,
    *,
    trace_id: str = "decode",
    prefill_chunk: int | None = None,
    slot_memory_bytes: int | None = None,
    lookahead: bool = False,
    placement: str | None = None,
    wait_s: float = 0,
) -> DecodeRun:
    """Decodes `tokens` greedy tokens after the prompt, experts served as `request` says; call from the main thread.

    With a warm-up pass the same is decoded twice, and the second time is measured. placement: of `placement.PLACEMENTS`
    for a decoder on a CUDA device, checked before; null on the processor.

    Raises:
        UnusableReplay: model and pool do not go together, or an owner must know the future. NotServed: the run did not
            complete. And as `replay.replay`.
    """
    _check_pool(decoder, pool)
    chunk = _chunk(decoder, pool, len(prompt_ids), prefill_chunk, slot_memory_bytes or SLOT_MEMORY_BYTES)
    passes = [len(prompt_ids[begin : begin + chunk]) for begin in range(0, len(prompt_ids), chunk)]
    planned = _planned_trace(decoder, pool, passes, tokens, trace_id)
    first_object = dict(zip(pool.moe_layer_ids, pool.layer_first_object[:-1].tolist(), strict=True))
    done: list[tuple[Decoded, npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []

    def ask(asking: Asking, reads: ReadPlan) -> None:
        source = TierSource(asking, first_object, _shapes(decoder, pool, reads), placement)
        decoded = decoder.decode(prompt_ids, tokens, source, prefill_chunk=chunk, lookahead=lookahead)
        done.append((decoded, asking.request_ns.copy(), asking.served_ns.copy()))

    def asked() -> Trace:
        return routed_trace(decoder, pool, done[-1][0], trace_id)

    run, asking = replay_as_asked(
        planned, pool, request, event_slots=_most_accesses(decoder, max(passes)), ask=ask, asked=asked, wait_s=wait_s
    )
    decoded, request_ns, served_ns = done[-1]
    trace = asked()
    waits = waits_ns(trace.event_step, request_ns, served_ns, asking.arrays["check_end_ns"])
    is_decode = trace.event_phase == PHASE_CODES["decode"]
    of_phase = {
        phase: sum(one.pass_ns for one in decoded.passes if one.phase == phase) for phase in ("prefill", "decode")
    }
    return DecodeRun(
        run=run,
        decoded=decoded,
        trace=trace,
        prefill_ns=of_phase["prefill"],
        prefill_wait_ns=int(waits[~is_decode].sum()),
        decode_ns=of_phase["decode"],
        decode_wait_ns=int(waits[is_decode].sum()),
        layers=_layer_rows(trace, decoded, waits),
        warm_sha256=done[0][0].sha256 if len(done) > 1 else None,
        warm_up_ns=sum(one.pass_ns for one in done[0][0].passes) if len(done) > 1 else None,
    )


def routed_trace(decoder: Decoder, pool: Pool, decoded: Decoded, trace_id: str) -> Trace:
    """The routes that a decode took, one step a pass, as a canonical trace in memory."""
    return _trace(
        decoder,
        pool,
        [(one.phase, [event.expert_ids for event in one.events]) for one in decoded.passes],
        trace_id,
    )


def _check_pool(decoder: Decoder, pool: Pool) -> None:
    if pool.checkpoint is None:
        raise UnusableReplay(
            f"{pool.folder}: a pool of made-up bytes decodes nothing; make one by: replayer pool map MODEL"
        )
    held = dict(zip(pool.moe_layer_ids, pool.experts_per_layer, strict=True))
    wanted = decoder.experts_per_layer
    if held != wanted:
        layer_id = min(layer for layer in {**held, **wanted} if held.get(layer) != wanted.get(layer))
        raise UnusableReplay(
            f"{pool.folder}: layer {layer_id} has {held.get(layer_id, 0)} experts in the pool, "
            f"{wanted.get(layer_id, 0)} in the model; map the pool from this model"
        )


def _most_accesses(decoder: Decoder, rows: int) -> int:
    return min(max(decoder.experts_per_layer.values()), rows * decoder.top_k)


def _chunk(decoder: Decoder, pool: Pool, prompt: int, said: int | None, memory_bytes: int) -> int:
    """Tokens of a pass over the prompt: what was said, or as many as have their experts in the slots."""
    if said is not None and said < 1:
        raise UnusableReplay(f"--prefill-chunk {said}, wanted at least 1")
    slots = max(memory_bytes // int(pool.object_bytes.max()), decoder.top_k)
    fits = prompt if slots >= max(decoder.experts_per_layer.values()) else max(slots // decoder.top_k, 1)
    return min(said or fits, fits, prompt)


def _planned_trace(decoder: Decoder, pool: Pool, passes: Sequence[int], tokens: int, trace_id: str) -> Trace:
    """As many events as will come, each with the most experts it can have."""
    routes = []
    for rows in [*passes, *[1] * (tokens - 1)]:
        places = np.arange(rows * decoder.top_k).reshape(rows, decoder.top_k)
        routes.append([places % experts for experts in decoder.experts_per_layer.values()])
    phases = ["prefill"] * len(passes) + ["decode"] * (tokens - 1)
    return _trace(decoder, pool, list(zip(phases, routes, strict=True)), trace_id)


def _trace(
    decoder: Decoder, pool: Pool, passes: Sequence[tuple[str, Sequence[npt.NDArray[Any]]]], trace_id: str
) -> Trace:
    layers = len(decoder.moe_layer_ids)
    events = [(step, layer, ids) for step, (_, routes) in enumerate(passes) for layer, ids in enumerate(routes)]
    rows = np.array([len(ids) for _, _, ids in events], dtype=np.int64)
    ids = np.concatenate([ids for _, _, ids in events]).astype(np.uint16)
    phase = np.repeat(np.array([PHASE_CODES[name] for name, _ in passes], dtype=np.int8), layers)
    of_phase = np.bincount(phase, weights=rows, minlength=len(PHASE_CODES))
    accesses = sum(len(np.unique(one)) for _, _, one in events)
    cuts = pool.layer_first_object
    sizes = [pool.object_bytes[cuts[layer] : cuts[layer + 1]].tolist() for layer in range(layers)]
    metadata = TraceMetadata.model_validate(
        {
            "schema_version": SCHEMA_VERSION, "trace_id": trace_id, "supersedes": None, "model": decoder.family,
            "engine": f"expert-tier, torch {torch.__version__}", "domain": None, "capture_method": "replayer decode",
            "hidden_layers": None, "moe_layer_ids": list(decoder.moe_layer_ids), "layer_base": "recorded",
            "experts_per_layer": list(decoder.experts_per_layer.values()), "num_experts_source": "declared",
            "top_k_model": decoder.top_k, "top_k_observed": decoder.top_k, "expert_bytes": sizes,
            "id_space": "logical", "weight_kind": None, "rank_known": True, "pass_boundaries": "recorded",
            "source": {"file": "", "folder": "", "format": "decode", "bytes": 0, "sha256": "0" * 64},
            "user_metadata": {}, "parser_version": 0,
            "counts": {
                "rows": len(ids), "events": len(events), "steps": len(passes), "requests": 1,
                "selections": ids.size, "accesses": accesses,
                "accepted_tokens": sum(name == "decode" for name, _ in passes) + 1,
                "rows_by_phase": {name: int(of_phase[code]) for name, code in PHASE_CODES.items()}, "dropped_rows": {},
            },
            "checks": [], "engine_observations": [],
        }
    )  # fmt: skip
    return Trace(
        metadata=metadata,
        event_layer=np.array([layer for _, layer, _ in events], dtype=np.int32),
        event_step=np.array([step for step, _, _ in events], dtype=np.int64),
        event_phase=phase,
        event_first_row=np.concatenate([[0], np.cumsum(rows)]).astype(np.int64),
        expert_ids=ids,
        layer_first_object=np.asarray(cuts, dtype=np.int64),
    )


def _shapes(decoder: Decoder, pool: Pool, reads: ReadPlan) -> list[list[Shape]]:
    """(O,) of each object, its tensors in a slot."""
    assert pool.checkpoint is not None, "checked before"
    parts = pool.checkpoint.extent_part
    found: list[list[Shape]] = []
    for obj in range(pool.num_objects):
        found.append([])
        for extent in range(int(pool.object_first_extent[obj]), int(pool.object_first_extent[obj + 1])):
            begin = int(reads.slot_offset[extent] + reads.skip[extent])
            part = parts[extent]
            shape = decoder.part_shapes[part]
            found[-1].append(Shape(part, begin, int(reads.wanted[extent]), decoder.expert_dtype, shape))
    return found


def waits_ns(
    event_step: npt.NDArray[np.int64],
    request_ns: npt.NDArray[np.int64],
    served_ns: npt.NDArray[np.int64],
    check_end_ns: npt.NDArray[np.int64],
) -> npt.NDArray[np.int64]:
    """(N,) ns that each event was waited for.

    The loop counts residency after each step: a request that comes meanwhile waits from when that is over, since no
    engine would count there.
    """
    checked = np.concatenate([[0], check_end_ns[:-1]])[event_step]
    waits: npt.NDArray[np.int64] = served_ns - np.maximum(request_ns, np.minimum(checked, served_ns))
    return waits


def _layer_rows(trace: Trace, decoded: Decoded, waits: npt.NDArray[np.int64]) -> list[dict[str, Any]]:
    rows: dict[tuple[str, int], dict[str, Any]] = {}
    events = ((one.phase, event) for one in decoded.passes for event in one.events)
    for (phase, event), wait_ns in zip(events, waits.tolist(), strict=True):
        nothing = dict.fromkeys(("events", "accesses", "wait_ns", "compute_ns", "lookahead_ns"), 0)
        row = rows.setdefault((phase, event.layer_id), {"phase": phase, "layer_id": event.layer_id, **nothing})
        row["events"] += 1
        row["accesses"] += len(event.asked)
        row["wait_ns"] += wait_ns
        row["compute_ns"] += event.before_ns + event.experts_ns
        row["lookahead_ns"] += event.lookahead_ns
    return list(rows.values())
