"""The canonical trace: its Arrow schema and the metadata every file carries.

One row per token position of one pass of one layer, key (`event_id`, `row_in_event`), sorted by it, row groups of
whole steps. `read` and `write` live elsewhere (`replayer.trace`, `pipeline.canonical`); this module only says what is
right.
"""

import re
from typing import Annotated, Literal

import pyarrow as pa
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from schemas.columns import PASS_KINDS, PHASES

SCHEMA_VERSION = "1.0"
METADATA_KEY = b"expert_tier"
TRACE_ID_PATTERN = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")

PHASE_CODES: dict[str, int] = {name: code for code, name in enumerate(PHASES)}
PASS_KIND_CODES: dict[str, int] = {name: code for code, name in enumerate(PASS_KINDS)}

IdSpace = Literal["logical", "physical", "local", "slot"]
WeightKind = Literal["softmax", "renormalised", "scaled", "sigmoid", "logits", "absent"]
CheckOutcome = Literal["ok", "warn", "refuse", "not_applicable", "not_reached"]
StoredOutcome = Literal["ok", "warn", "not_applicable"]
Phase = Literal["prefill", "decode", "warmup", "unknown"]
MAX_TOP_K = 512
"""Most experts per token; the largest in use are a few dozen, and checks of a row grow with its square."""
MAX_EXPERT_BYTES = 2**40

NonNegativeInt = Annotated[int, Field(ge=0, lt=2**63, strict=True)]
LayerId = Annotated[int, Field(ge=0, le=65535, strict=True)]
NumLayers = Annotated[int, Field(gt=0, le=65536, strict=True)]
NumExperts = Annotated[int, Field(gt=0, le=65535, strict=True)]
TopK = Annotated[int, Field(gt=0, le=MAX_TOP_K, strict=True)]
ExpertBytes = Annotated[int, Field(gt=0, le=MAX_EXPERT_BYTES, strict=True)]
Text = Annotated[str, StringConstraints(max_length=4096)]


def arrow_schema(top_k: int) -> pa.Schema:
    """The Arrow schema of a canonical trace whose rows select `top_k` experts."""
    enum = pa.dictionary(pa.int8(), pa.string())
    return pa.schema(
        [
            pa.field("event_id", pa.uint32(), nullable=False),
            pa.field("row_in_event", pa.uint16(), nullable=False),
            pa.field("step_id", pa.uint32(), nullable=False),
            pa.field("request_id", pa.uint32(), nullable=False),
            pa.field("token_position", pa.uint32()),
            pa.field("phase", enum, nullable=False),
            pa.field("pass_kind", enum, nullable=False),
            pa.field("layer_id", pa.uint16(), nullable=False),
            pa.field("expert_ids", pa.list_(pa.field("element", pa.uint16(), nullable=False), top_k), nullable=False),
            pa.field("router_weights", pa.list_(pa.field("element", pa.float16()), top_k)),
            pa.field("predicted_expert_ids", pa.list_(pa.field("element", pa.uint16(), nullable=False))),
        ]
    )


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class UserMetadata(_Model):
    """What a user may say of a dump, in `<dump>.toml` or `--meta key=value`. What nobody says stays unknown."""

    model: Text | None = None
    engine: Text | None = None
    domain: Text | None = None
    capture_method: Text | None = None
    hidden_layers: NumLayers | None = None
    moe_layer_ids: list[LayerId] | None = Field(default=None, description="the model's numbers of the dump's layers")
    num_experts: NumExperts | None = None
    top_k_model: TopK | None = None
    expert_bytes: ExpertBytes | list[ExpertBytes] | list[list[ExpertBytes]] | None = Field(
        default=None, description="one size, or one per MoE layer, or one list per MoE layer with one per expert"
    )
    expert_id_base: Annotated[int, Field(ge=0, le=1, strict=True)] | None = Field(
        default=None, description="1 if the dump counts experts from 1"
    )
    shared_experts: Annotated[int, Field(ge=1, le=16, strict=True)] | None = Field(
        default=None, description="shared experts fused into the ids as num_experts.. in every row; they are left out"
    )
    drop_warmup: Annotated[bool, Field(strict=True)] | None = Field(
        default=None, description="true to leave leading warm-up rows out of the trace instead of marking them"
    )
    sequence_lengths: list[NonNegativeInt] | None = Field(
        default=None, description="tokens of each request, in order; rows at later positions are padding, left out"
    )
    id_space: IdSpace | None = None
    weight_kind: WeightKind | None = None
    phase: Literal["prefill", "decode"] | None = Field(default=None, description="phase of rows the dump leaves open")
    tied_routing: Annotated[bool, Field(strict=True)] | None = Field(
        default=None, description="true if the model really shares routes between layers"
    )
    repeated_tokens: Annotated[bool, Field(strict=True)] | None = Field(
        default=None, description="true if the model really runs one token many times in a row, with the same routes"
    )

    @field_validator("moe_layer_ids", mode="after")
    @classmethod
    def _layers_ascend(cls, layers: list[int] | None) -> list[int] | None:
        if layers is not None and sorted(set(layers)) != layers:
            raise ValueError("moe_layer_ids must ascend without repeats")
        return layers


class CheckVerdict(_Model):
    """How one check of a dump went: `refuse` says why there is no trace, `not_reached` that another refused before."""

    name: str
    outcome: CheckOutcome
    wanted: str
    found: str


class CheckRecord(CheckVerdict):
    """One check a dump went through. A failed check refuses the dump, so only these outcomes are ever stored."""

    outcome: StoredOutcome

    @field_validator("outcome", mode="before")
    @classmethod
    def _words_of_before(cls, value: object) -> object:
        # Traces written before version 2 of the parser say it in other words.
        return {"passed": "ok", "warned": "warn"}.get(value, value) if isinstance(value, str) else value


class Source(_Model):
    """The raw dump a trace was made of."""

    file: str = Field(description="file name, without its folder")
    folder: str = Field(description="absolute folder the dump was read from, where it is looked for to parse it again")
    format: Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,63}$")] = Field(
        description="the layout's name, as in the list of formats"
    )
    bytes: NonNegativeInt
    sha256: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]


class Counts(_Model):
    """Sizes of a trace, as written."""

    rows: NonNegativeInt
    events: NonNegativeInt
    steps: NonNegativeInt
    requests: NonNegativeInt
    selections: NonNegativeInt
    accesses: NonNegativeInt
    accepted_tokens: NonNegativeInt
    rows_by_phase: dict[Phase, NonNegativeInt]
    dropped_rows: dict[str, NonNegativeInt] = Field(description="reason → rows of the dump that are not in the trace")


class EngineObservation(_Model):
    """Hits and misses the engine itself recorded, kept beside our own and never mixed with them."""

    meaning: str
    accesses: NonNegativeInt
    hits: NonNegativeInt
    misses: NonNegativeInt


class ModelFile(_Model):
    """What a model file said of the routed experts: its content, wherever it lay."""

    kind: Literal["gguf", "safetensors", "config"]
    hidden_layers: NumLayers | None
    predicting_layers: NonNegativeInt = Field(description="layers behind them that predict further tokens")
    moe_layer_ids: list[LayerId] | None
    num_experts: NumExperts | None
    top_k_model: TopK | None
    expert_bytes: ExpertBytes | list[ExpertBytes] | list[list[ExpertBytes]] | None = Field(
        description="one size, or in the order of moe_layer_ids one per layer or a list with one per expert"
    )
    sizes_from: Text = Field(description="how sizes were found: `tensors`, a formula in words, or why they were not")


class TraceMetadata(_Model):
    """The JSON under the Parquet key `expert_tier`. Unknown is null, and shown as unknown."""

    schema_version: str
    trace_id: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._-]{0,127}$")]
    supersedes: str | None
    model: str | None
    engine: str | None
    domain: str | None
    capture_method: str | None
    hidden_layers: NumLayers | None
    moe_layer_ids: list[LayerId]
    layer_base: Literal["recorded", "declared", "assumed_from_0"]
    experts_per_layer: list[NumExperts] = Field(description="in the order of moe_layer_ids")
    num_experts_source: Literal["declared", "observed"]
    top_k_model: TopK | None
    top_k_observed: TopK
    expert_bytes: list[ExpertBytes] | list[list[ExpertBytes]] | None = Field(
        description="per MoE layer, or per MoE layer and expert; null if unknown"
    )
    id_space: IdSpace | None
    weight_kind: WeightKind | None
    rank_known: bool
    pass_boundaries: Literal["recorded", "assumed_per_token"]
    source: Source
    user_metadata: UserMetadata
    model_file: ModelFile | None = Field(default=None, description="null if no model file was named")
    parser_version: int
    counts: Counts
    checks: list[CheckRecord]
    engine_observations: list[EngineObservation]

    @model_validator(mode="after")
    def _lengths_agree(self) -> "TraceMetadata":
        layers = len(self.moe_layer_ids)
        if sorted(set(self.moe_layer_ids)) != self.moe_layer_ids:
            raise ValueError("moe_layer_ids must ascend without repeats")
        if len(self.experts_per_layer) != layers:
            raise ValueError(f"experts_per_layer has {len(self.experts_per_layer)} entries for {layers} layers")
        if self.expert_bytes is not None:
            if len(self.expert_bytes) != layers:
                raise ValueError(f"expert_bytes has {len(self.expert_bytes)} entries for {layers} layers")
            for sizes, num_experts in zip(self.expert_bytes, self.experts_per_layer, strict=True):
                if isinstance(sizes, list) and len(sizes) != num_experts:
                    raise ValueError(f"expert_bytes has {len(sizes)} sizes for a layer of {num_experts} experts")
        return self

    @property
    def unknowns(self) -> list[str]:
        """Names of the facts that neither dump nor user says, in a fixed order."""
        facts = {
            "model": self.model,
            "engine": self.engine,
            "domain": self.domain,
            "capture_method": self.capture_method,
            "hidden_layers": self.hidden_layers,
            "layer_base": None if self.layer_base == "assumed_from_0" else self.layer_base,
            "num_experts": None if self.num_experts_source == "observed" else self.num_experts_source,
            "top_k_model": self.top_k_model,
            "expert_bytes": self.expert_bytes,
            "id_space": self.id_space,
            "weight_kind": self.weight_kind,
            "router_order": self.rank_known or None,
            "pass_boundaries": None if self.pass_boundaries == "assumed_per_token" else self.pass_boundaries,
            "phase": None if self.counts.rows_by_phase.get("unknown") else "said",
        }
        return [name for name, value in facts.items() if value is None]

    def sizes_of_layer(self, layer: int) -> list[int] | None:
        """Bytes of each expert of the `layer`-th MoE layer (an ordinal, not a layer_id); null if unknown."""
        if self.expert_bytes is None:
            return None
        sizes = self.expert_bytes[layer]
        return sizes if isinstance(sizes, list) else [sizes] * self.experts_per_layer[layer]
