"""What a model file says of its routed experts, and how it fills what a dump and its user leave open.

A GGUF file and safetensors files are measured: the bytes of each expert's tensors, from their headers alone. A
config.json has no tensors: sizes follow from a formula that is written down with them, or stay unknown. A user's word
goes before the file's, with a warning where they differ; a dump that contradicts the file is refused.
"""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.dumps.blocks import MalformedDump, ParsedDump
from replayer.checkpoints import INDEX, Config, Experts, MalformedCheckpoint, find_experts
from schemas.trace import CheckRecord, ModelFile, UserMetadata

_FACTS = ("hidden_layers", "num_experts", "top_k_model")
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "float8_e5m2": 1}
_MATRICES = 3
"""gate, up and down of a gated feed-forward network."""

_KNOWN_LAYER_KEYS = frozenset(
    {"first_k_dense_replace", "decoder_sparse_step", "mlp_only_layers", "moe_layer_freq", "mlp_layer_types"}
)
_OTHER_LAYER_KEYS = re.compile(r"(?=.*(moe|expert|sparse|dense|block_type|mlp))(?=.*(layer|step|freq|offset|replace))")
"""Keys that may say which layers have experts, in a way that is not known here."""


_WANTED = "wanted a GGUF file, safetensors files (their folder or index), or a config.json"


def read_model(path: Path) -> ModelFile:
    """What a model file says; `path` is a GGUF or safetensors file, a folder of them, their index, or a config.json.

    Raises:
        MalformedCheckpoint: it is none of these, or contradicts itself. OSError: it cannot be read.
    """
    if not path.exists() and not path.is_symlink():
        raise MalformedCheckpoint(f"{path}: no such file or folder; {_WANTED}")
    if path.is_dir() and not any(path.glob("*.safetensors")) and not (path / INDEX).exists():
        there = f"; its config.json is one, name {path / 'config.json'}" if (path / "config.json").exists() else ""
        raise MalformedCheckpoint(f"{path}: a folder without safetensors files{there or f'; {_WANTED}'}")
    is_json = False
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(8)
        # A safetensors file may begin with the same byte; the length that it begins with has zeros.
        is_json = head.lstrip().startswith(b"{") and b"\0" not in head
    try:
        if not is_json:
            return _measured(find_experts(path))
        config = Config(path)
        if "weight_map" not in config.texts[0]:
            return _by_config(config)
        if path.name != INDEX:
            raise MalformedCheckpoint(f"{path}: an index of safetensors files, wanted under the name {INDEX}")
        return _measured(find_experts(path.parent))
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise MalformedCheckpoint(f"{path}: {key}: {first['msg']} (found {first['input']!r:.80})") from None


def _measured(experts: Experts) -> ModelFile:
    counts = sorted(set(experts.experts_per_layer.values()))
    if len(counts) > 1:
        raise MalformedCheckpoint(
            f"{experts.files[0].parent}: layers of {counts[0]} to {counts[-1]} experts; one number for all layers is "
            "supported, so say sizes and layers in a TOML file beside the dump"
        )
    sizes: Counter[tuple[int, int]] = Counter()
    for one in experts.slices:
        sizes[one.layer_id, one.expert_id] += one.length_bytes
    by_layer = [[sizes[layer, expert] for expert in range(counts[0])] for layer in experts.experts_per_layer]
    if experts.top_k is not None and experts.top_k > counts[0]:
        raise MalformedCheckpoint(
            f"{experts.files[0].parent}: {experts.top_k} experts per token, but the layers have only {counts[0]}; is "
            "the model whole? download it again"
        )
    is_equal = all(len(set(of_layer)) == 1 for of_layer in by_layer)
    return ModelFile(
        kind="gguf" if experts.scheme.startswith("gguf") else "safetensors",
        hidden_layers=experts.hidden_layers,
        predicting_layers=experts.predicting_layers,
        moe_layer_ids=list(experts.experts_per_layer),
        num_experts=counts[0],
        top_k_model=experts.top_k,
        expert_bytes=[of_layer[0] for of_layer in by_layer] if is_equal else by_layer,
        sizes_from="tensors",
    )


def _by_config(config: Config) -> ModelFile:
    config.check()
    experts, hidden_layers, top_k = config.experts, config.hidden_layers, config.top_k
    if experts is None:
        raise MalformedCheckpoint(
            f"{config.path}: no number of routed experts (n_routed_experts, num_local_experts, num_experts); wanted "
            "the config.json of a mixture-of-experts model"
        )
    # The text that names the experts is the one that describes their layers.
    text = next(one for one in config.texts if experts[1] in one)
    size, sizes_from = _by_formula(text, config.texts[0])
    return ModelFile(
        kind="config",
        hidden_layers=hidden_layers[0] if hidden_layers else None,
        predicting_layers=0,
        moe_layer_ids=_moe_layers(config.path, text, hidden_layers[0]) if hidden_layers else None,
        num_experts=experts[0],
        top_k_model=top_k[0] if top_k else None,
        expert_bytes=size,
        sizes_from=sizes_from,
    )


def _by_formula(text: dict[str, Any], whole: dict[str, Any]) -> tuple[int | None, str]:
    """(bytes of an expert or null, how they were found or why not)."""
    if any(one.get("quantization_config") is not None for one in (text, whole)):
        return None, "unknown: quantised, and config.json does not say what a quantised expert takes"
    intermediate = "moe_intermediate_size" if text.get("moe_intermediate_size") is not None else "intermediate_size"
    parts = [text.get("hidden_size"), text.get(intermediate)]
    dtype = next((one[key] for one in (text, whole) for key in ("torch_dtype", "dtype") if one.get(key)), None)
    if not all(type(part) is int and part > 0 for part in parts) or str(dtype) not in _DTYPE_BYTES:
        return None, f"unknown: wanted hidden_size, {intermediate} and torch_dtype as numbers and a known type"
    item_bytes = _DTYPE_BYTES[str(dtype)]
    words = f"{_MATRICES} × hidden_size {parts[0]} × {intermediate} {parts[1]} × {item_bytes} bytes ({dtype})"
    return _MATRICES * int(parts[0] or 0) * int(parts[1] or 0) * item_bytes, f"formula: {words}"


def _moe_layers(path: Path, text: dict[str, Any], hidden_layers: int) -> list[int] | None:
    """Layers with routed experts, null where a key that is not known here may say which.

    Layer i has experts if i ≥ first_k_dense_replace, moe_layer_freq divides i (or says 1 in its place of a list),
    decoder_sparse_step divides i + 1, and neither mlp_only_layers nor mlp_layer_types name it dense: as the modelling
    code of DeepSeek, Qwen and GLM reads these keys.
    """
    others = [key for key in text if key not in _KNOWN_LAYER_KEYS and text[key] not in (None, [], 0, False)]
    if any(_OTHER_LAYER_KEYS.match(key) for key in others):
        return None
    if hidden_layers > 65536:
        raise MalformedCheckpoint(f"{path}: {hidden_layers} layers, wanted up to 65536")
    first = text.get("first_k_dense_replace") or 0
    step = text.get("decoder_sparse_step") or 1
    frequency = text.get("moe_layer_freq") or 1
    dense, types = text.get("mlp_only_layers") or [], text.get("mlp_layer_types")
    sound = all(type(one) is int and one >= 0 for one in (first, step)) and isinstance(dense, list)
    sound = sound and ((type(frequency) is int and frequency > 0) or _is_list_of(frequency, hidden_layers))
    if not sound or not (types is None or _is_list_of(types, hidden_layers)):
        raise MalformedCheckpoint(
            f"{path}: first_k_dense_replace, decoder_sparse_step, moe_layer_freq, mlp_only_layers or mlp_layer_types "
            f"is no number, or no list of {hidden_layers}; download the file again"
        )
    if first >= hidden_layers:
        raise MalformedCheckpoint(
            f"{path}: first_k_dense_replace is {first}, but there are {hidden_layers} hidden layers, so none would "
            "have experts; correct one, or download the file again"
        )
    beyond = [layer for layer in dense if type(layer) is not int or not 0 <= layer < hidden_layers]
    if beyond:
        raise MalformedCheckpoint(
            f"{path}: mlp_only_layers names {beyond[0]!r:.40}, but there are {hidden_layers} hidden layers "
            f"(0..{hidden_layers - 1}); correct one, or download the file again"
        )
    layers = [
        layer
        for layer in range(hidden_layers)
        if layer >= first
        and (layer + 1) % step == 0
        and (bool(frequency[layer]) if isinstance(frequency, list) else layer % frequency == 0)
        and layer not in dense
        and (types is None or types[layer] == "sparse")
    ]
    if not layers:
        said = [key for key in sorted(_KNOWN_LAYER_KEYS) if text.get(key)]
        raise MalformedCheckpoint(
            f"{path}: {', '.join(said)} leave none of the {hidden_layers} hidden layers with experts; correct them, or "
            "download the file again"
        )
    return layers


def _is_list_of(value: object, length: int) -> bool:
    return isinstance(value, list) and len(value) == length


# Filling


def filled(user: UserMetadata, model: ModelFile | None) -> UserMetadata:
    """The user's words and, where they leave a fact open, the model file's: for parsers, which know no dump's yet."""
    if model is None:
        return user
    names = (*_FACTS, "moe_layer_ids")
    return user.model_copy(update={name: getattr(model, name) for name in names if getattr(user, name) is None})


def fill(path: Path, parsed: ParsedDump, user: UserMetadata, model: ModelFile) -> UserMetadata:
    """Fills in `parsed` what dump and user leave open; returns what the user says, with numbers for nameless layers.

    Raises:
        MalformedDump: the dump contradicts the model file in something that its user does not say.
    """
    differences = []
    for name in _FACTS:
        theirs, own = getattr(model, name), getattr(parsed, name)
        if theirs is None:
            continue
        said = getattr(user, name)
        # Some engines count the layers that predict further tokens.
        same = {theirs, theirs + model.predicting_layers} if name == "hidden_layers" else {theirs}
        if said is not None:
            if said not in same:
                differences.append(f"you say {name} = {said}, the model file {theirs}")
        elif own is None:
            setattr(parsed, name, theirs)
        elif own not in same:
            raise _contradiction(path, f"{name} = {own}", f"{name} = {theirs}")
    differences += _fill_sizes(path, parsed, user, model)
    numbered = user
    if user.moe_layer_ids is None and model.moe_layer_ids is not None and parsed.layers_are_ordinals:
        numbered = user.model_copy(update={"moe_layer_ids": model.moe_layer_ids})
    elif user.moe_layer_ids is not None and model.moe_layer_ids is not None:
        odd = sorted(set(user.moe_layer_ids) - set(model.moe_layer_ids))
        differences += [f"you say that layers {odd[:5]} have experts, the model file does not"] if odd else []
    layers = "layers unknown" if model.moe_layer_ids is None else f"{len(model.moe_layer_ids)} layers"
    parsed.checks.append(
        CheckRecord(
            name="model file agrees",
            outcome="warn" if differences else "ok",
            wanted="the dump, its user and the model file say the same",
            found="; ".join(
                [f"{model.kind}: {layers} × {model.num_experts} experts, sizes from {model.sizes_from}", *differences]
            ),
        )
    )
    return numbered


def _fill_sizes(path: Path, parsed: ParsedDump, user: UserMetadata, model: ModelFile) -> list[str]:
    """Fills the sizes; what the user or the dump say otherwise, in words."""
    theirs = _sizes_by_layer(model)
    own = parsed.layer_expert_bytes
    if theirs is None:
        return []
    if user.expert_bytes is not None:
        return ["sizes are those that you say"]
    if own is None:
        parsed.layer_expert_bytes = theirs
        return []
    # One size for all layers differs in the first, if it does.
    of_layers: list[int] = next((list(one) for one in (theirs, own) if isinstance(one, dict)), [0])
    for layer in of_layers:
        dumped = own if isinstance(own, int) else own.get(layer)
        filed = theirs if isinstance(theirs, int) else theirs[layer]
        if dumped is None or _spread(dumped, model) == _spread(filed, model):
            continue
        words = [f"experts of {_range(sizes)} bytes in layer {layer}" for sizes in (dumped, filed)]
        if model.sizes_from == "tensors":
            raise _contradiction(path, words[0], words[1])
        return [f"the dump says {words[0]}, which are kept; by {model.sizes_from} it would be {words[1]}"]
    return []


def _sizes_by_layer(model: ModelFile) -> int | dict[int, int] | dict[int, list[int]] | None:
    if isinstance(model.expert_bytes, list):
        by_layer: Any = dict(zip(model.moe_layer_ids or (), model.expert_bytes, strict=True))
        return by_layer  # type: ignore[no-any-return]
    return model.expert_bytes


def _spread(sizes: int | Sequence[int], model: ModelFile) -> list[int]:
    return [sizes] * (model.num_experts or 1) if isinstance(sizes, int) else list(sizes)


def _range(sizes: int | Sequence[int]) -> str:
    if isinstance(sizes, int):
        return str(sizes)
    return str(min(sizes)) if min(sizes) == max(sizes) else f"{min(sizes)} to {max(sizes)}"


def check_layers(path: Path, layer_ids: list[int], model: ModelFile) -> None:
    """Raises MalformedDump if the dump has routes of a layer in which the model file has no experts."""
    odd = sorted(set(layer_ids) - set(layer_ids if model.moe_layer_ids is None else model.moe_layer_ids))
    if odd:
        known = model.moe_layer_ids or []
        raise _contradiction(
            path,
            f"routes of layers {odd[:5]}{' and more' if len(odd) > 5 else ''}",
            f"experts in {len(known)} layers, {known[0]} to {known[-1]}" if known else "no layer with experts",
        )


def _contradiction(path: Path, dump: str, model: str) -> MalformedDump:
    return MalformedDump(
        f"{path}: the dump has {dump}, the model file has {model}; is it another model's? name the right one, or "
        "leave --model out"
    )
