"""Greedy decoding with experts from elsewhere: token ids and a source of experts in; tokens, routing and times out.

The spine of the model stays in memory (`families` loads it); every routed expert is asked of an `ExpertSource`, one
call per event: one pass of one MoE layer. Who serves the bytes changes no token. Where bytes lie and what a run proves
belong to `pool`, `owners` and `replay`.

Shapes: N tokens of the pass, K experts chosen per token, D hidden, I inner size of an expert, V vocabulary.
"""

import hashlib
import importlib
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from replayer.families import Network, UnusableCheckpoint, load_network

__all__ = [
    "Decoded", "Decoder", "Decoding", "Event", "ExpertSource", "Pass", "UnusableCheckpoint", "load_decoder",
    "read_prompt", "text_of",
]  # fmt: skip

Phase = Literal["prefill", "decode"]
_BYTES = 256
_TOKENIZER = "tokenizer.json"


class ExpertSource(Protocol):
    """Whoever holds the experts' weights."""

    def serve(self, layer_id: int, expert_ids: Sequence[int]) -> Sequence[Mapping[str, Tensor]]:
        """The experts' tensors by their name below the expert (`Decoder.part_shapes`), in the order asked for.

        They stay valid until the next call; any device and floating dtype, converted to those of the computation.
        """


@dataclass(frozen=True, eq=False)
class Event:
    """One pass of one MoE layer.

    expert_ids int32 and weights float32, both (N, K): tokens by position, each token's experts largest weight first
    (where the router gives them in no order, by weight, then number). asked: the union in order of first mention, as
    the source was asked. predicted_expert_ids (N, K): what the previous MoE layer's hidden state chose at this layer's
    router; null in the first MoE layer, and without lookahead.

    before_ns: from the end of the previous event, or the pass's begin, to the call of the source, without the time of
    predicting, which is lookahead_ns. wait_ns: until the source returned. experts_ns: until the layer's experts were
    computed. On an accelerator the last is the time to enqueue, and the work itself falls in the next before_ns.
    """

    layer_id: int
    expert_ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]
    asked: tuple[int, ...]
    predicted_expert_ids: npt.NDArray[np.int32] | None
    before_ns: int
    lookahead_ns: int
    wait_ns: int
    experts_ns: int


@dataclass(frozen=True)
class Pass:
    """One forward pass: a part of the prompt, or one generated token. first_position counts from 0 in the sequence."""

    first_position: int
    phase: Phase
    events: tuple[Event, ...]
    pass_ns: int

    @property
    def after_ns(self) -> int:
        """From the last event's end to the logits in host memory."""
        return self.pass_ns - sum(
            one.before_ns + one.lookahead_ns + one.wait_ns + one.experts_ns for one in self.events
        )


@dataclass(frozen=True)
class Decoded:
    """A finished generation."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    passes: tuple[Pass, ...]

    @property
    def sha256(self) -> str:
        """Of the generated token ids as little-endian uint32, in hexadecimal."""
        return hashlib.sha256(np.array(self.token_ids, dtype="<u4").tobytes()).hexdigest()


class Decoding:
    """One sequence under way: its keys and values, and the source that serves its experts."""

    def __init__(
        self, network: Network, device: torch.device, source: ExpertSource, *, lookahead: bool = False
    ) -> None:
        self._network, self._device, self._source = network, device, source
        self._cache = network.model.new_cache()
        self._events: list[Event] = []
        self._predicted: npt.NDArray[np.int32] | None = None
        self.position = 0
        layers = sorted(network.experts)
        self._next_layer = dict(itertools.pairwise(layers)) if lookahead else {}

    @torch.inference_mode()
    def feed(self, token_ids: Sequence[int], phase: Phase) -> tuple[Tensor, Pass]:
        """Runs one pass over the next tokens; returns the logits (V,) after the last, float32 in host memory."""
        begin = time.perf_counter_ns()
        for one in self._network.experts.values():
            one.events = self
        self._events, self._predicted, self._ended_ns = [], None, begin
        tokens = torch.tensor(token_ids, dtype=torch.int64, device=self._device)
        try:
            logits = self._network.model.next_logits(tokens, self._cache).float().cpu()  # (V,)
        finally:
            # A finished sequence's cache and source are not the model's to keep.
            for one in self._network.experts.values():
                one.events = None
        done = Pass(self.position, phase, tuple(self._events), time.perf_counter_ns() - begin)
        self.position += len(token_ids)
        return logits, done

    def begin(self, layer_id: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> dict[int, Mapping[str, Tensor]]:
        """Asks the source for the experts of a layer; called by the layer itself."""
        ids, chosen_weights = self._ranked(expert_ids, weights)
        asked = tuple(dict.fromkeys(ids.flatten().tolist()))
        before_ns = time.perf_counter_ns()
        predicted = None
        if (following := self._next_layer.get(layer_id)) is not None:
            _, likely_weights, likely = self._network.gates[following](x)
            predicted, _ = self._ranked(likely, likely_weights)
        asked_ns = time.perf_counter_ns()
        served = dict(zip(asked, self._source.serve(layer_id, asked), strict=True))
        self._served_ns = time.perf_counter_ns()
        self._events.append(
            Event(
                layer_id=layer_id,
                expert_ids=ids,
                weights=chosen_weights,
                asked=asked,
                predicted_expert_ids=self._predicted,
                before_ns=before_ns - self._ended_ns,
                lookahead_ns=asked_ns - before_ns,
                wait_ns=self._served_ns - asked_ns,
                experts_ns=0,
            )
        )
        self._predicted = predicted
        return served

    def end(self, layer_id: int) -> None:
        """Takes the time; called by the layer itself."""
        self._ended_ns = time.perf_counter_ns()
        last = self._events[-1]
        assert last.layer_id == layer_id, "layers run one after the other"
        self._events[-1] = replace(last, experts_ns=self._ended_ns - self._served_ns)

    def _ranked(self, expert_ids: Tensor, weights: Tensor) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        expert_ids, weights = expert_ids.cpu(), weights.float().cpu()  # (N, K)
        if not self._network.is_router_sorted:
            order = expert_ids.argsort(dim=1)
            expert_ids, weights = expert_ids.gather(1, order), weights.gather(1, order)
            order = weights.argsort(dim=1, descending=True, stable=True)
            expert_ids, weights = expert_ids.gather(1, order), weights.gather(1, order)
        return expert_ids.to(torch.int32).numpy(), weights.numpy()


class Decoder:
    """A model ready to decode, one sequence at a time."""

    def __init__(self, folder: Path, network: Network, device: torch.device) -> None:
        self.folder, self.device, self._network = folder, device, network
        self.family = network.family
        self.computed_by = network.computed_by
        self.moe_layer_ids = tuple(sorted(network.experts))
        self.experts_per_layer = {layer_id: network.experts[layer_id].num_experts for layer_id in self.moe_layer_ids}
        self.top_k = network.top_k
        self.vocab_size = network.vocab_size
        self.max_positions = network.max_positions
        self.part_shapes = network.part_shapes
        """Name of a tensor below an expert → its shape, the same for every expert of every layer."""
        self.expert_dtype = network.expert_dtype
        """As stored; `dtype` is what is computed in."""
        self.dtype = network.dtype

    def begin(self, source: ExpertSource, *, lookahead: bool = False) -> Decoding:
        return Decoding(self._network, self.device, source, lookahead=lookahead)

    def decode(
        self,
        prompt_ids: Sequence[int],
        tokens: int,
        source: ExpertSource,
        *,
        prefill_chunk: int | None = None,
        on_pass: Callable[[Pass], None] | None = None,
        lookahead: bool = False,
    ) -> Decoded:
        """Continues the prompt with the likeliest token each time, the lowest id where several are as likely.

        Exactly `tokens` of them: a token that ends a text ends nothing here, so that runs are equally long. The
        prompt's last pass yields the first, so `tokens - 1` passes of one token follow, and the last one is never read.

        Args:
            prefill_chunk: tokens of the prompt per pass; the whole prompt is one pass without.
            on_pass: called with every pass when it is done.
            lookahead: also applies the next MoE layer's router to the hidden state that enters a layer's router; the
                choice is recorded in the next layer's event and changes nothing else.

        Raises:
            UnusableCheckpoint: the prompt is empty, too long, or has a token that the model lacks; or the weights give
                logits that are no numbers.
        """
        prompt = tuple(int(one) for one in prompt_ids)
        self.check(prompt, tokens, prefill_chunk)
        sequence = self.begin(source, lookahead=lookahead)
        passes: list[Pass] = []
        generated: list[int] = []

        def feed(token_ids: Sequence[int], phase: Phase) -> Tensor:
            logits, done = sequence.feed(token_ids, phase)
            passes.append(done)
            if on_pass is not None:
                on_pass(done)
            return logits

        step = prefill_chunk or len(prompt)
        for first in range(0, len(prompt), step):
            logits = feed(prompt[first : first + step], "prefill")
        generated.append(self._likeliest(logits, sequence.position))
        while len(generated) < tokens:
            generated.append(self._likeliest(feed(generated[-1:], "decode"), sequence.position))
        return Decoded(prompt, tuple(generated), tuple(passes))

    def check(self, prompt: Sequence[int], tokens: int, prefill_chunk: int | None = None) -> None:
        """Raises UnusableCheckpoint, ValueError: as `decode` would before it begins."""
        if tokens < 1 or (prefill_chunk is not None and prefill_chunk < 1):
            raise ValueError(f"tokens {tokens}, prefill_chunk {prefill_chunk}: wanted 1 or more")
        if not prompt:
            raise UnusableCheckpoint(f"{self.folder}: the prompt has no tokens; wanted one or more, so give it text")
        beyond = [one for one in prompt if not 0 <= one < self.vocab_size]
        if beyond:
            raise UnusableCheckpoint(
                f"{self.folder}: token id {beyond[0]} of the prompt, and {len(beyond) - 1} more; wanted 0 to "
                f"{self.vocab_size - 1}, the vocabulary of the model, so use its own tokenizer"
            )
        read = len(prompt) + tokens - 1
        if read > self.max_positions:
            raise UnusableCheckpoint(
                f"{self.folder}: a prompt of {len(prompt)} tokens and {tokens} generated take {read} positions, wanted "
                f"up to {self.max_positions} (max_position_embeddings); shorten the prompt or ask for fewer tokens"
            )

    def _likeliest(self, logits: Tensor, position: int) -> int:
        best = (logits == logits.max()).nonzero()
        if not len(best):
            raise UnusableCheckpoint(
                f"{self.folder}: logits after position {position - 1} are not numbers; wanted finite ones, so compute "
                "in float32 or download the checkpoint again"
            )
        return int(best[0, 0])


def load_decoder(
    folder: Path, *, device: str = "cpu", dtype: Literal["checkpoint", "float32"] = "checkpoint"
) -> Decoder:
    """Loads the spine of a checkpoint (config.json, safetensors in one file or several); no routed expert is read.

    dtype `checkpoint` computes in what the routed experts are stored in, as serving engines do, so a served byte is a
    computed byte; the spine is converted to it, but for routers that their family keeps in float32. `float32` converts
    each expert as it is used: slower, for comparing with references that compute so, such as the bundled sample's.

    Reading the spine leaves its files' pages in the page cache.

    Raises:
        UnusableCheckpoint: it cannot be decoded. OSError: a file cannot be read.
        NoAccelerator: device cuda where torch sees none.
    """
    chosen = torch.device(device)
    return Decoder(folder, load_network(folder, device=chosen, dtype=dtype), chosen)


def read_prompt(path: Path, decoder: Decoder, *, max_bytes: int = 16 << 20) -> list[int]:
    """Token ids of a text file: by the folder's tokenizer.json, or byte by byte for a model of 256 tokens without one.

    With the special tokens that the tokenizer puts around a text.

    Raises:
        UnusableCheckpoint: the file is too large, empty or no UTF-8, or the model has no tokenizer that can be read.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if not 0 < len(content) <= max_bytes:
        found = "is empty" if not content else "is longer"
        raise UnusableCheckpoint(f"{path}: {found}; wanted a prompt of 1 to {max_bytes} bytes")
    tokenizer = _tokenizer_of(decoder)
    if tokenizer is None:
        return list(content)
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise UnusableCheckpoint(f"{path}: byte {error.start} is no UTF-8; wanted text, so convert the file") from None
    return list(tokenizer.encode(text).ids)


def text_of(token_ids: Sequence[int], decoder: Decoder) -> str:
    """The text of generated tokens; bytes that are no UTF-8 become U+FFFD."""
    tokenizer = _tokenizer_of(decoder)
    if tokenizer is None:
        return bytes(token_ids).decode(errors="replace")
    return str(tokenizer.decode(list(token_ids)))


def _tokenizer_of(decoder: Decoder) -> Any:
    """The tokenizer of the model; null where a token is a byte."""
    path = decoder.folder / _TOKENIZER
    if not path.exists():
        if decoder.vocab_size == _BYTES:
            return None
        raise UnusableCheckpoint(
            f"{decoder.folder}: no {_TOKENIZER}, and a vocabulary of {decoder.vocab_size} is not one of bytes; put the "
            f"model's {_TOKENIZER} beside its config.json"
        )
    if not path.is_file():
        raise UnusableCheckpoint(f"{path}: no regular file, wanted the model's tokenizer; put it there")
    try:
        tokenizers = importlib.import_module("tokenizers")
    except ImportError as error:
        raise UnusableCheckpoint(
            f"{path}: read by the library tokenizers, which is not here; install it: pip install 'expert-tier[decode]'"
        ) from error
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:
        # The library has no class of its own for a file it cannot read.
        raise UnusableCheckpoint(
            f"{path}: no tokenizer that can be read ({str(error)[:120]}); download it again"
        ) from error
