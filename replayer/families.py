"""A checkpoint in; a network out whose spine is resident and whose routed experts are asked for, event by event.

The spine is all but the routed experts: embeddings, attention, norms, routers, shared experts, dense layers, output
matrix. Qwen3-MoE is computed by `qwen3_moe`, the other families by transformers' modelling code with its experts
replaced. Nothing is fetched, unpickled or run from a checkpoint; config and headers are untrusted, so every size is
compared with the tensors' shapes before anything of that size is made. Tokens and time belong to `decoder`.

Shapes: N tokens of the pass, K experts chosen per token, D hidden, I inner size of an expert, V vocabulary.
"""

import importlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn import functional

from replayer import qwen3_moe
from replayer.checkpoints import Config, MalformedCheckpoint, files_of, read_header
from replayer.device import NoAccelerator

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMED = 3
_DOWNLOAD = "download the checkpoint again"
_LAYER = re.compile(r"model\.layers\.(\d{1,5})\.(.+)", re.ASCII)


class UnusableCheckpoint(ValueError):
    """A checkpoint, or a prompt for it, that cannot be decoded; one line: where, what was wanted and found, what to do.

    Its own class so that a command can tell it from a fault of this code.
    """


@dataclass(frozen=True)
class Family:
    """How a family of models names things. matrices: gate, up and down of one expert, below the expert."""

    classes: str  # transformers has {classes}Config and {classes}ForCausalLM
    matrices: tuple[str, str, str] = ("gate_proj.weight", "up_proj.weight", "down_proj.weight")
    block: str = "mlp"  # what the checkpoint calls the module that transformers calls mlp
    is_router_sorted: bool = True


FAMILIES = {
    "mixtral": Family("Mixtral", ("w1.weight", "w3.weight", "w2.weight"), block="block_sparse_moe"),
    "qwen2_moe": Family("Qwen2Moe"),
    "qwen3_moe": Family("Qwen3Moe"),
    "olmoe": Family("Olmoe"),
    "deepseek_v2": Family("DeepseekV2", is_router_sorted=False),
    "deepseek_v3": Family("DeepseekV3", is_router_sorted=False),
}
"""By the model_type of config.json."""


class Events(Protocol):
    """Whoever serves the experts of a pass, and hears when a layer begins and ends."""

    def begin(
        self, layer_id: int, x: Tensor, expert_ids: Tensor, weights: Tensor
    ) -> Mapping[int, Mapping[str, Tensor]] | None:
        """x (N, D), expert_ids and weights (N, K) of the router → the experts by number; null leaves them out."""

    def end(self, layer_id: int) -> None: ...


class RoutedExperts(nn.Module):
    """The experts of one layer: no weights of its own, called as transformers calls its module of experts."""

    def __init__(self, layer_id: int, num_experts: int, sizes: tuple[int, int], family: Family, act: Any) -> None:
        super().__init__()
        self.layer_id, self.num_experts, self.act = layer_id, num_experts, act
        self.hidden_size, self.inner_size = sizes
        self.gate, self.up, self.down = family.matrices
        self.events: Events | None = None

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """x (N, D), expert_ids and weights (N, K) → (N, D).

        In the order of the reference (transformers' loop: experts ascending, each one's tokens by rank, then position,
        the weight applied in its own dtype, the sum kept in that of x), whatever the order the experts came in.
        """
        assert self.events is not None, "a pass says who serves it before it runs"
        served = self.events.begin(self.layer_id, x, expert_ids, weights)
        mixed = torch.zeros_like(x)  # (N, D)
        chosen = expert_ids.cpu().T  # (K, N)
        for expert_id in sorted(served or ()):
            rank, token = (place.to(x.device) for place in torch.where(chosen == expert_id))  # (tokens of the expert)
            assert served is not None
            y = self._compute(x[token], served[expert_id])  # (tokens, D)
            mixed.index_add_(0, token, (y * weights[token, rank, None]).to(mixed.dtype))
        self.events.end(self.layer_id)
        return mixed

    def _compute(self, x: Tensor, expert: Mapping[str, Tensor]) -> Tensor:
        gate, up, down = (expert[name].to(x.device, x.dtype) for name in (self.gate, self.up, self.down))
        return functional.linear(self.act(functional.linear(x, gate)) * functional.linear(x, up), down)


class Model(Protocol):
    """A language model that keeps one sequence's keys and values in a cache."""

    def new_cache(self) -> Any: ...

    def next_logits(self, token_ids: Tensor, cache: Any) -> Tensor:
        """Logits (V,) after the last of `token_ids` (T,), which follow what is in the cache and join it."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """A model ready to run. `computed_by` is `expert-tier` or `transformers VERSION`.

    experts, gates: layer → the module of its routed experts, of its router. part_shapes: name of a tensor below an
    expert → its shape, the same for all experts. expert_dtype: as stored; dtype: as computed.
    """

    model: Model
    family: str
    is_router_sorted: bool
    computed_by: str
    experts: dict[int, RoutedExperts]
    gates: dict[int, nn.Module]
    top_k: int
    vocab_size: int
    max_positions: int
    part_shapes: dict[str, tuple[int, ...]]
    expert_dtype: torch.dtype
    dtype: torch.dtype


class _Stored(NamedTuple):
    file: Path
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Checkpoint:
    folder: Path
    config: dict[str, Any]
    tensors: dict[str, _Stored]

    def contradiction(self, what: str) -> UnusableCheckpoint:
        return UnusableCheckpoint(f"{self.folder / 'config.json'}: {what}; {_DOWNLOAD}, config and weights alike")


class _Skeleton(NamedTuple):
    """A model on the meta device: shapes, no memory. `root` owns the names of the tensors."""

    model: Model
    root: nn.Module
    computed_by: str
    max_positions: int
    is_tied: bool
    float32_names: tuple[str, ...] = ()


def load_network(folder: Path, *, device: torch.device, dtype: str) -> Network:
    """Checks a checkpoint against its config, then loads its spine; no routed expert is read.

    Raises:
        UnusableCheckpoint: it cannot be computed. OSError: a file cannot be read.
        NoAccelerator: device cuda where torch sees none.
    """
    if device.type == "cuda" and not torch.cuda.is_available():
        raise NoAccelerator(f"device {device}, but torch {torch.__version__} sees no CUDA device; use cpu")
    checkpoint = _read_checkpoint(folder)
    model_type = checkpoint.config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise UnusableCheckpoint(
            f"{folder / 'config.json'}: model_type {str(model_type)[:40]!r} is no family that is decoded; wanted one "
            f"of {', '.join(FAMILIES)}"
        )
    family = FAMILIES[model_type]
    _refuse_quantised(checkpoint)
    _bound_by_tensors(checkpoint)
    skeleton = _build(checkpoint, family)
    experts = {one.layer_id: one for one in skeleton.root.modules() if isinstance(one, RoutedExperts)}
    if not experts:
        raise checkpoint.contradiction("no layer with routed experts, wanted a mixture-of-experts model")
    names = _names_on_disk(skeleton, family)
    # Routers' shapes bound the experts that are looked for next.
    _check_spine(checkpoint, skeleton, names)
    expert_dtype = _check_experts(checkpoint, family, experts)
    _check_nothing_else(checkpoint, skeleton, family, names, experts)
    computed = {"checkpoint": expert_dtype, "float32": torch.float32}[dtype]
    _fill(checkpoint, skeleton, names, device, computed)
    one = next(iter(experts.values()))
    network = Network(
        model=skeleton.model,
        family=model_type,
        is_router_sorted=family.is_router_sorted,
        computed_by=skeleton.computed_by,
        experts=experts,
        gates={layer_id: skeleton.root.get_submodule(f"model.layers.{layer_id}.mlp.gate") for layer_id in experts},
        top_k=0,
        vocab_size=checkpoint.tensors["model.embed_tokens.weight"].shape[0],
        max_positions=skeleton.max_positions,
        part_shapes=_part_shapes(one, family),
        expert_dtype=expert_dtype,
        dtype=computed,
    )
    return _tried(checkpoint, network, device)


def _read_checkpoint(folder: Path) -> _Checkpoint:
    if not folder.is_dir() or not (folder / "config.json").exists():
        raise UnusableCheckpoint(
            f"{folder}: no folder with a config.json; wanted one with that and model.safetensors, or several and their "
            "index"
        )
    tensors: dict[str, _Stored] = {}
    try:
        config = Config(folder / "config.json").texts[0]
        for path in files_of(folder):
            read_header(path)
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    one = file.get_slice(name)
                    found = _Stored(path, one.get_dtype(), tuple(one.get_shape()))
                    if tensors.setdefault(name, found) is not found:
                        raise UnusableCheckpoint(
                            f"{path}: tensor {name[:80]!r} is in {tensors[name].file} as well; keep one of them"
                        )
    except MalformedCheckpoint as error:
        raise UnusableCheckpoint(str(error)) from error
    except FileNotFoundError as error:
        raise UnusableCheckpoint(f"{error.filename}: no such file, though the index names it; {_DOWNLOAD}") from error
    except SafetensorError as error:
        raise UnusableCheckpoint(f"{folder}: safetensors cannot read it ({_first_line(error)}); {_DOWNLOAD}") from error
    return _Checkpoint(folder, config, tensors)


def _refuse_quantised(checkpoint: _Checkpoint) -> None:
    packed = [(name, one) for name, one in sorted(checkpoint.tensors.items()) if one.dtype not in _FLOATS]
    remedy = "decode a copy of the model in BF16, F16 or F32"
    if packed:
        name, one = packed[0]
        raise UnusableCheckpoint(
            f"{one.file}: tensor {name[:120]!r} is {one.dtype}, and so are {len(packed) - 1} more neither F32, F16 nor "
            f"BF16; no other kind of weight is computed here: {remedy}"
        )
    if quantised := checkpoint.config.get("quantization_config"):
        method = quantised.get("quant_method") if isinstance(quantised, dict) else quantised
        raise UnusableCheckpoint(
            f"{checkpoint.folder / 'config.json'}: quantization_config says {str(method)[:40]!r}, though all tensors "
            f"are plain; remove the entry if they were dequantised, else {remedy}"
        )


def _bound_by_tensors(checkpoint: _Checkpoint) -> None:
    """Layers and experts cost time and memory even without weights, so their numbers are those of the files."""
    config = Config(checkpoint.folder / "config.json")
    places = [match for name in checkpoint.tensors if (match := _LAYER.fullmatch(name))]
    held = {int(match[1]) for match in places}
    if config.hidden_layers is None or config.hidden_layers[0] > len(held):
        found = (
            "no num_hidden_layers" if config.hidden_layers is None else f"num_hidden_layers {config.hidden_layers[0]}"
        )
        raise checkpoint.contradiction(f"{found}, but the files hold tensors of {len(held)} layers (model.layers.N.…)")
    if config.experts is None or config.experts[0] > len(checkpoint.tensors):
        found = "no number of experts" if config.experts is None else f"{config.experts[1]} {config.experts[0]}"
        raise checkpoint.contradiction(f"{found}, but the files hold {len(checkpoint.tensors)} tensors in all")
    if config.top_k is not None and config.top_k[0] > config.experts[0]:
        raise checkpoint.contradiction(
            f"{config.top_k[1]} {config.top_k[0]}, wanted up to {config.experts[1]} {config.experts[0]}"
        )
    # The one size that shapes do not bound: rotary frequencies are made for this share of a head.
    for place in (checkpoint.config, *(checkpoint.config.get(key) for key in ("rope_parameters", "rope_scaling"))):
        share = place.get("partial_rotary_factor", 1) if isinstance(place, dict) else 1
        if type(share) not in (int, float) or not 0 < share <= 1:
            raise checkpoint.contradiction(
                f"partial_rotary_factor {str(share)[:40]}, wanted a share of the head, up to 1"
            )


def _build(checkpoint: _Checkpoint, family: Family) -> _Skeleton:
    if family.classes == "Qwen3Moe":
        needs = qwen3_moe.Config.not_computed(checkpoint.config)
        if needs is None:
            return _build_own(checkpoint, family)
        return _build_with_transformers(checkpoint, family, f"qwen3_moe with {needs}")
    return _build_with_transformers(checkpoint, family, str(checkpoint.config["model_type"]))


def _build_own(checkpoint: _Checkpoint, family: Family) -> _Skeleton:
    try:
        config = qwen3_moe.Config.read(checkpoint.config)
    except ValueError as error:
        raise checkpoint.contradiction(str(error)) from error

    def experts(layer_id: int) -> RoutedExperts:
        sizes = (config.hidden_size, config.moe_intermediate_size)
        return RoutedExperts(layer_id, config.num_experts, sizes, family, functional.silu)

    with torch.device("meta"):
        model = qwen3_moe.Qwen3Moe(config, experts)
    return _Skeleton(model, model, "expert-tier", config.max_position_embeddings, config.tie_word_embeddings)


class _FromTransformers:
    def __init__(self, model: Any, cache: Any) -> None:
        self.model, self._cache = model, cache

    def new_cache(self) -> Any:
        return self._cache(config=self.model.config)

    def next_logits(self, token_ids: Tensor, cache: Any) -> Tensor:
        return self.model(input_ids=token_ids[None], cache=cache, use_cache=True, logits_to_keep=1).logits[0, -1]


# Keys that choose code or outputs instead of describing the model; some name a repository to fetch code from.
_NOT_THE_MODEL = frozenset(
    {
        "architectures", "auto_map", "attn_implementation", "experts_implementation", "dtype", "torch_dtype",
        "quantization_config", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict",
        "use_cache", "use_kernels", "transformers_version", "name_or_path",
    }
)  # fmt: skip


def _build_with_transformers(checkpoint: _Checkpoint, family: Family, needing: str) -> _Skeleton:
    try:
        # Typed as Any: two million lines are not for the type checker.
        transformers: Any = importlib.import_module("transformers")
        hub_errors: Any = importlib.import_module("huggingface_hub.errors")
        classes = [getattr(transformers, f"{family.classes}{kind}") for kind in ("Config", "ForCausalLM")]
    except (ImportError, AttributeError) as error:
        raise UnusableCheckpoint(
            f"{checkpoint.folder}: {needing} is computed by transformers 5.24 or newer, which is not here "
            f"({_first_line(error)}); install it: pip install 'expert-tier[decode]'"
        ) from error
    stored = {
        key: value for key, value in checkpoint.config.items() if key not in _NOT_THE_MODEL and not key.startswith("_")
    }
    try:
        config = classes[0].from_dict(stored)
        # The library may not choose another by what is installed.
        config._attn_implementation, config._experts_implementation = "sdpa", "eager"
        with torch.device("meta"):
            root = classes[1](config)
        root.eval()
    except (*_FAULTS, hub_errors.StrictDataclassError) as error:
        raise checkpoint.contradiction(
            f"transformers {transformers.__version__} builds no model of it ({_first_line(error)})"
        ) from error
    for layer_id, layer in enumerate(root.model.layers):
        replaced = getattr(layer.mlp, "experts", None)
        if replaced is not None:
            sizes = (replaced.hidden_dim, replaced.intermediate_dim)
            layer.mlp.experts = RoutedExperts(layer_id, replaced.num_experts, sizes, family, replaced.act_fn)
    return _Skeleton(
        _FromTransformers(root, transformers.DynamicCache),
        root,
        f"transformers {transformers.__version__}",
        config.max_position_embeddings,
        bool(config.tie_word_embeddings),
        tuple(root._keep_in_fp32_modules_strict or ()),
    )


_FAULTS = (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError, ArithmeticError, AssertionError)
"""What a model that its config describes wrongly raises while it is built or tried."""


def _names_on_disk(skeleton: _Skeleton, family: Family) -> dict[str, str]:
    """Name of a tensor in the files → name of it in the model."""
    names = {}
    for name in skeleton.root.state_dict(keep_vars=True):
        if not (skeleton.is_tied and name == "lm_head.weight"):
            names[name.replace(".mlp.", f".{family.block}.")] = name
    return names


def _part_shapes(experts: RoutedExperts, family: Family) -> dict[str, tuple[int, ...]]:
    wide, narrow = (experts.inner_size, experts.hidden_size), (experts.hidden_size, experts.inner_size)
    return dict(zip(family.matrices, (wide, wide, narrow), strict=True))


def _check_experts(checkpoint: _Checkpoint, family: Family, experts: Mapping[int, RoutedExperts]) -> torch.dtype:
    """Every expert that the config tells of is there, in the shape it tells of; returns the dtype of all."""
    wanted = {
        f"model.layers.{layer_id}.{family.block}.experts.{expert_id}.{part}": (layer_id, expert_id, shape)
        for layer_id, one in experts.items()
        for expert_id in range(one.num_experts)
        for part, shape in _part_shapes(one, family).items()
    }
    missing = [name for name in wanted if name not in checkpoint.tensors]
    if missing:
        places = list(dict.fromkeys(wanted[name][:2] for name in missing))
        listed = ", ".join(f"layer {layer_id} expert {expert_id}" for layer_id, expert_id in places[:_NAMED])
        more = f" and {len(places) - _NAMED} more" if len(places) > _NAMED else ""
        raise UnusableCheckpoint(
            f"{checkpoint.folder}: no tensor {missing[0]!r}; wanted {len(wanted)} of routed experts by config.json; "
            f"{len(missing)} are missing: {listed}{more}; download the checkpoint again, or name the folder that has "
            "all of it"
        )
    for name, (_, _, shape) in wanted.items():
        _check_shape(checkpoint, name, shape)
    dtypes = {checkpoint.tensors[name].dtype: name for name in wanted}
    if len(dtypes) > 1:
        (one, first), (other, second) = sorted(dtypes.items())[:2]
        raise UnusableCheckpoint(
            f"{checkpoint.folder}: {first!r} is {one} and {second!r} is {other}; wanted all routed experts of one dtype"
        )
    return _FLOATS[next(iter(dtypes))]


def _check_spine(checkpoint: _Checkpoint, skeleton: _Skeleton, names: Mapping[str, str]) -> None:
    missing = [name for name in names if name not in checkpoint.tensors]
    if missing:
        more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
        raise UnusableCheckpoint(
            f"{checkpoint.folder}: no tensor {', '.join(map(repr, missing[:_NAMED]))}{more}, wanted by config.json; "
            "download the checkpoint again, or name the folder that has all of it"
        )
    held = skeleton.root.state_dict(keep_vars=True)
    for name, own in names.items():
        _check_shape(checkpoint, name, tuple(held[own].shape))


def _check_shape(checkpoint: _Checkpoint, name: str, shape: tuple[int, ...]) -> None:
    one = checkpoint.tensors[name]
    if one.shape != shape:
        raise UnusableCheckpoint(
            f"{one.file}: tensor {name!r} has shape {list(one.shape)}, wanted {list(shape)} by config.json; "
            f"{_DOWNLOAD}, config and weights alike"
        )


def _check_nothing_else(
    checkpoint: _Checkpoint,
    skeleton: _Skeleton,
    family: Family,
    names: Mapping[str, str],
    experts: Mapping[int, RoutedExperts],
) -> None:
    """A tensor that the model has no place for would be left out of the result without a word."""
    layers = len(skeleton.root.get_submodule("model.layers"))  # type: ignore[arg-type]
    known = set(names) | {
        f"model.layers.{layer_id}.{family.block}.experts.{expert_id}.{part}"
        for layer_id, one in experts.items()
        for expert_id in range(one.num_experts)
        for part in family.matrices
    }
    for name, one in checkpoint.tensors.items():
        match = _LAYER.fullmatch(name)
        if (
            name in known
            # Those predict further tokens.
            or (match is not None and int(match[1]) >= layers)
            # Older versions stored what is computed from the config.
            or name.endswith("rotary_emb.inv_freq")
            or (skeleton.is_tied and name == "lm_head.weight")
        ):
            continue
        raise checkpoint.contradiction(
            f"its model has no place for tensor {name[:100]!r} of shape {list(one.shape)} in {one.file.name}"
        )


def _fill(
    checkpoint: _Checkpoint, skeleton: _Skeleton, names: Mapping[str, str], device: torch.device, dtype: torch.dtype
) -> None:
    by_file: dict[Path, list[str]] = {}
    for name in names:
        by_file.setdefault(checkpoint.tensors[name].file, []).append(name)
    state: dict[str, Tensor] = {}
    for path, own in by_file.items():
        with safe_open(path, framework="pt") as file:
            for name in own:
                kept = torch.float32 if name.endswith(tuple(f".{word}" for word in skeleton.float32_names)) else dtype
                # A copy: what safetensors gives is the mapped file, whose pages may leave.
                state[names[name]] = file.get_tensor(name).to(device=device, dtype=kept, copy=True)
    root: Any = skeleton.root
    root.load_state_dict(state, strict=False, assign=True)
    if skeleton.is_tied:
        root.lm_head.weight = root.model.embed_tokens.weight
    for name, module in list(root.named_modules()):
        if "RotaryEmbedding" in type(module).__name__:
            # Its buffers are in no file; it computes them from the config, which meta tensors cannot hold.
            root.set_submodule(name, type(module)(config=root.config).to(device))
    root.requires_grad_(False)
    left = [name for name, one in (*root.named_parameters(), *root.named_buffers()) if one.is_meta]
    assert not left, f"{left[:_NAMED]} are of the spine, but in no file and not computed"


class _Trial:
    """Leaves all experts out and keeps what the routers chose."""

    def __init__(self) -> None:
        self.chosen: dict[int, tuple[int, ...]] = {}

    def begin(self, layer_id: int, x: Tensor, expert_ids: Tensor, weights: Tensor) -> None:
        self.chosen[layer_id] = tuple(expert_ids.shape)

    def end(self, layer_id: int) -> None:
        pass


@torch.inference_mode()
def _tried(checkpoint: _Checkpoint, network: Network, device: torch.device) -> Network:
    """One token through the spine: what shapes alone do not tell (heads, groups of experts) fails before any run."""
    trial = _Trial()
    for one in network.experts.values():
        one.events = trial
    try:
        logits = network.model.next_logits(torch.zeros(1, dtype=torch.int64, device=device), network.model.new_cache())
    except _FAULTS as error:
        raise checkpoint.contradiction(f"a token through its model fails ({_first_line(error)})") from error
    top_ks = {shape[1] for shape in trial.chosen.values()}
    if top_ks == {0}:
        raise checkpoint.contradiction("no experts chosen per token, wanted one or more")
    assert list(trial.chosen) == sorted(network.experts), "layers run in their order, and each asks for its experts"
    assert len(top_ks) == 1 and logits.shape == (network.vocab_size,), (top_ks, logits.shape)
    return replace(network, top_k=top_ks.pop())


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
