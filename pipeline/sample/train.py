"""Train the sample model on the standard library's text, then record its routing: `python -m pipeline.sample.train`.

In: the corpus and the flags. Out, in the folder `--out`: the checkpoint (`config.json`, `model.safetensors`), for each
domain a dump `<domain>.route.csv.gz` with its `.toml`, and `sample.json`, the record of how they came about. The
network itself belongs in `model.py`. Training stops by the clock, so two runs differ in their number of steps and
weights; the dumps follow from the checkpoint alone.

Shapes: B sequences, T positions, N = B * T tokens, E experts of a layer, K experts chosen per token, V vocabulary.
"""

import argparse
import gzip
import io
import json
import math
import platform
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from pipeline.sample.corpus import DOMAINS, read_corpus
from pipeline.sample.model import (
    Config,
    LayerRouting,
    Pass,
    SampleModel,
    decode_greedily,
    held_out_bits,
    load_checkpoint,
    write_checkpoint,
)

MODEL_NAME = "expert-tier-sample"
SEQUENCES = 16  # B, half of them from each domain
POSITIONS = 128  # T
PEAK_LEARNING_RATE = 2e-3  # after 90 steps, 1.5e-3 was ahead of 3e-3 by 0.07 bits per byte
WARMUP_SHARE = 0.03  # of the training time
BALANCE_WEIGHT = 0.01
PROMPTS = 20
PROMPT_BYTES = 16
DECODE_PASSES = 24


def balance_loss(routing: LayerRouting) -> Tensor:
    """Return the load-balancing loss of one layer: 1 if all experts are used alike, up to E if few are.

    E * sum over experts of (share of selections) * (mean router probability), Fedus et al. 2021, Switch Transformers,
    equations 4 to 6, for K choices per token. Hugging Face takes it over the tokens of all layers at once and counts
    selections per token, which gives K at balance; here it is per layer, so that no layer can make up for another.
    """
    E = routing.probabilities.shape[1]
    share = torch.bincount(routing.expert_ids.flatten(), minlength=E) / routing.expert_ids.numel()  # (E)
    return E * (share * routing.probabilities.mean(dim=0)).sum()


def draw_batch(texts: dict[str, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return inputs and targets (B, T): random windows, an equal number from each domain."""
    windows = []
    for domain in DOMAINS:
        starts = torch.randint(len(texts[domain]) - POSITIONS, (SEQUENCES // len(DOMAINS), 1), generator=generator)
        windows.append(texts[domain][starts + torch.arange(POSITIONS + 1)])
    batch = torch.cat(windows).long()  # (B, T + 1)
    return batch[:, :-1], batch[:, 1:]


def train(texts: dict[str, bytes], *, minutes: float, seed: int) -> tuple[SampleModel, int]:
    """Train from scratch for the given time and return the model and the number of steps taken."""
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    tensors = {domain: torch.frombuffer(bytearray(text), dtype=torch.uint8) for domain, text in texts.items()}
    model = SampleModel(Config())
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ],
        betas=(0.9, 0.95),
        fused=True,
    )
    started, steps = time.monotonic(), 0
    while (progress := (time.monotonic() - started) / (60 * minutes)) < 1:
        cosine = 0.5 * (1 + math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LEARNING_RATE * min(progress / WARMUP_SHARE, cosine)
        inputs, targets = draw_batch(tensors, generator)
        logits, routing, _ = model(inputs)
        loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        balance = torch.stack([balance_loss(layer) for layer in routing]).mean()
        optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward(loss + BALANCE_WEIGHT * balance)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if steps % 100 == 0:
            bits, balanced = loss.item() / math.log(2), balance.item()
            print(f"{progress:4.0%}  step {steps:5d}  {bits:.3f} bits per byte  balance {balanced:.3f}", flush=True)
    return model.eval(), steps


def choose_prompts(text: bytes) -> list[bytes]:
    """Return prompts from evenly spaced places of the text: the first bytes of the next line that is long enough."""
    prompts = []
    for i in range(PROMPTS):
        lines = text[i * len(text) // PROMPTS :].split(b"\n", 200)[1:-1]
        prompts.append(next(line[:PROMPT_BYTES] for line in lines if len(line[:PROMPT_BYTES].rstrip()) == PROMPT_BYTES))
    return prompts


def layer_bytes(config: Config) -> tuple[int, int]:
    """Return the bytes of one expert, and of all else in one layer, as stored in bfloat16."""
    d, c = config.hidden_size, config.head_dim
    expert = 3 * d * config.moe_intermediate_size
    attention = 2 * d * c * (config.num_attention_heads + config.num_key_value_heads)
    norms_and_router = 2 * d + 2 * c + d * config.num_experts
    return 2 * expert, 2 * (attention + norms_and_router)


def write_dump(path: Path, turns: list[list[Pass]], config: Config) -> None:
    """Write the routing of each turn's passes as gzipped route CSV v1: a pass at a time, layer by layer within it.

    The same routing gives the same file: the gzip header holds no time and no name.
    """
    expert_bytes, dense_bytes = layer_bytes(config)
    layers = range(config.num_hidden_layers)
    lines = [
        "# route_trace v1",
        f"# model={MODEL_NAME} arch=qwen3moe n_layer={config.num_hidden_layers} n_expert={config.num_experts} "
        f"n_expert_used={config.num_experts_per_tok}",
        *(f"# layer={layer_id} expert_bytes={expert_bytes} dense_bytes={dense_bytes}" for layer_id in layers),
        "turn,phase,step,layer,slot,expert,weight,expert_bytes",
    ]
    for turn, passes in enumerate(turns):
        for phase, one_pass in ((min(i, 1), one_pass) for i, one_pass in enumerate(passes)):
            for layer_id, routing in enumerate(one_pass.routing):
                ids, weights = routing.expert_ids.tolist(), routing.weights.tolist()
                for token in range(len(ids)):
                    position = one_pass.first_position + token
                    for slot, (expert_id, weight) in enumerate(zip(ids[token], weights[token], strict=True)):
                        lines.append(
                            f"{turn},{phase},{position},{layer_id},{slot},{expert_id},{weight:.4g},{expert_bytes}"
                        )
    unfinished = path.with_name(path.name + ".part")
    with (
        unfinished.open("wb") as raw,
        gzip.GzipFile(filename="", mode="wb", compresslevel=9, fileobj=raw, mtime=0) as packed,
        io.TextIOWrapper(packed, encoding="ascii", newline="\n") as file,
    ):
        file.write("\n".join(lines) + "\n")
    unfinished.replace(path)


def write_metadata(path: Path, domain: str, config: Config) -> None:
    """Write what the dump itself does not say, as TOML beside it."""
    path.write_text(
        f'model = "{MODEL_NAME}, a toy of 5 million parameters"\n'
        'engine = "expert-tier sample (torch)"\n'
        f'domain = "{domain}"\n'
        f'capture_method = "Experts taken from the router of every layer in float32 on the CPU: {PROMPTS} prompts of '
        f"{PROMPT_BYTES} bytes from held-out text, each one prefill pass followed by {DECODE_PASSES} greedy decode "
        'passes."\n'
        f"hidden_layers = {config.num_hidden_layers}\n"
        f"moe_layer_ids = {list(range(config.num_hidden_layers))}\n"
        'weight_kind = "renormalised"\n'
        f"top_k_model = {config.num_experts_per_tok}\n"
        'id_space = "logical"\n'
    )


def routing_counts(turns: list[list[Pass]], config: Config) -> dict[str, float]:
    """Return how evenly experts are used and how often the next token uses them again, over all passes of a domain.

    `reuse` is W_1: selections that the same layer also made at the previous position of the same turn, over all
    selections that have a previous position. `chance` is what W_1 would be if each token drew its experts anew with
    the layer's own popularity: sum of p^2 over sum of p, p = share of the layer's tokens that selected the expert,
    both sums over experts and layers.
    """
    reused = followed = 0
    largest_selection_share, sum_p2, sum_p = 0.0, 0.0, 0.0
    for layer_id in range(config.num_hidden_layers):
        tokens: Counter[int] = Counter()
        positions = 0
        for passes in turns:
            chosen = [set(ids) for one_pass in passes for ids in one_pass.routing[layer_id].expert_ids.tolist()]
            for ids in chosen:
                tokens.update(ids)
            positions += len(chosen)
            reused += sum(len(before & after) for before, after in pairwise(chosen))
            followed += sum(len(after) for after in chosen[1:])
        largest_selection_share = max(largest_selection_share, max(tokens.values()) / tokens.total())
        sum_p2 += sum((count / positions) ** 2 for count in tokens.values())
        sum_p += tokens.total() / positions
    return {
        "reused_selections": reused,
        "followed_selections": followed,
        "reuse": reused / followed,
        "chance": sum_p2 / sum_p,
        "largest_selection_share": largest_selection_share,
        # One expert takes at most 1 / K of a layer's selections; the share of tokens can reach 1.
        "largest_token_share": largest_selection_share * config.num_experts_per_tok,
    }


def unigram_bits(text: bytes) -> float:
    """Return the bits per byte of the text's own byte frequencies: what a model without context cannot beat."""
    return -sum(n / len(text) * math.log2(n / len(text)) for n in Counter(text).values())


def capture(folder: Path, held_out: dict[str, bytes]) -> dict[str, dict[str, object]]:
    """Evaluate the checkpoint in the folder, write the dumps and their metadata beside it; return the figures."""
    model = load_checkpoint(folder)
    figures: dict[str, dict[str, object]] = {}
    for domain in DOMAINS:
        bits, predicted_bytes = held_out_bits(model, held_out[domain])
        prompts = choose_prompts(held_out[domain])
        decoded = [decode_greedily(model, prompt, decode_passes=DECODE_PASSES) for prompt in prompts]
        turns = [passes for _, passes in decoded]
        dump = folder / f"{domain}.route.csv.gz"
        write_dump(dump, turns, model.config)
        write_metadata(dump.with_name(dump.name + ".toml"), domain, model.config)
        windows = [text[i : i + 8] for text, _ in decoded for i in range(len(text) - 7)]
        figures[domain] = {
            "held_out_bits": bits,
            "held_out_bytes": predicted_bytes,
            "held_out_bits_per_byte": bits / predicted_bytes,
            "unigram_bits_per_byte": unigram_bits(held_out[domain]),
            **routing_counts(turns, model.config),
            "eight_byte_windows": len(windows),
            "distinct_eight_byte_windows": len(set(windows)),
            # One character per byte (latin-1), as prompts and continuations may cut a character in two.
            "prompts": [prompt.decode("latin-1") for prompt in prompts],
            "continuations": [text.decode("latin-1") for text, _ in decoded],
        }
    return figures


def main() -> None:
    """Train for `--minutes`, then evaluate and capture; the process exits 2 if the call was wrong."""
    parser = argparse.ArgumentParser(prog="python -m pipeline.sample.train", description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint, the dumps and sample.json")
    parser.add_argument(
        "--minutes",
        type=float,
        default=15.0,
        help="training time (default: 15, on two CPU cores); 0 keeps the checkpoint in --out and remakes the rest",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--threads", type=int, default=2, help="CPU threads for torch (default: 2; 1 is faster if the cores are shared)"
    )
    arguments = parser.parse_args()
    if arguments.minutes < 0:
        parser.error(f"--minutes must not be negative, got {arguments.minutes!r}")
    torch.set_num_threads(arguments.threads)

    record_path = arguments.out / "sample.json"
    corpus = read_corpus()
    if arguments.minutes > 0:
        model, steps = train(corpus["train"], minutes=arguments.minutes, seed=arguments.seed)
        write_checkpoint(model, arguments.out)
        record = {
            "model": MODEL_NAME,
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "seed": arguments.seed,
            "minutes": arguments.minutes,
            "threads": arguments.threads,
            "steps": steps,
            "trained_tokens": steps * SEQUENCES * POSITIONS,
            "train_bytes": {domain: len(text) for domain, text in corpus["train"].items()},
        }
    else:
        record = json.loads(record_path.read_text())
    record["python"] = platform.python_version()
    record["torch"] = torch.__version__
    record["domains"] = capture(arguments.out, corpus["held_out"])
    files = ["config.json", "model.safetensors", *(f"{domain}.route.csv.gz" for domain in DOMAINS)]
    record["file_bytes"] = {name: (arguments.out / name).stat().st_size for name in files}
    record_path.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
