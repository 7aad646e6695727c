"""The command `replayer decode`: a model and a prompt in, tokens, times and routes out."""

import argparse
import contextlib
import dataclasses
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from replayer.capacity import remove_leftovers
from replayer.checkpoints import MalformedCheckpoint
from replayer.command import Parser, byte_size, count
from replayer.decode_results import pair_row, run_row, told_of, write_decode, write_pair
from replayer.pool import Pool, map_pool, read_pool
from replayer.replay_cli import add_options_of_a_run, check_threads, print_verdicts, request_of
from replayer.request import Request, UnusableReplay, check_request
from replayer.routes import RoutedLayer, RoutedPass, is_routes, write_routes
from replayer.token_identity import Arm, summary, time_ratio, turns, void
from schemas.columns import OWNERS
from schemas.files import DataFolder

if TYPE_CHECKING:
    from replayer.decode import DecodeRun
    from replayer.decoder import Decoder

_EPILOG = """\
examples:
  replayer decode --model pipeline/sample --prompt PROMPT.txt --tokens 64
  replayer decode --model MODEL --prompt PROMPT.txt --tokens 64 --owner restream --cold
  replayer decode --model MODEL --prompt PROMPT.txt --tokens 64 --mechanism cgroup --capacity 8GiB --out routes.jsonl
  replayer decode --model MODEL --prompt A.txt --prompt B.txt --prompt C.txt --tokens 64 --experiment token-identity
  replayer decode --model MODEL --prompt PROMPT.txt --tokens 64 --data data

Embeddings, attention, norms, routers and shared experts stay in memory; every routed expert is read by --owner inside
the limit, as a replay reads it, and computed from where it was read to. Greedy tokens, exactly --tokens of them: an
end-of-text token does not end it. The same is decoded twice and the second time is measured, unless --cold.
--out writes the routes in the open dump format: expert-tier ingest takes it, prefill and decode told apart.
Models: the bundled sample and other Qwen3-MoE; with the extra `decode` also Mixtral, Qwen2-MoE, OLMoE and
DeepSeek-V2/V3 (safetensors, bfloat16, float16 or float32). Nothing is fetched.
Exits 1 when a proof about the bytes does not hold.
"""
MOST_TOKENS = 100_000


def add_decode_command(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Adds `decode` to the subparsers of a command line."""
    command = commands.add_parser(
        "decode",
        help="decode a model whose routed experts come through the tier",
        description="Decodes a mixture-of-experts model with its routed experts read as a replay reads them.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument(
        "--model", type=Path, required=True, metavar="DIR", help="a folder with config.json and safetensors files"
    )
    command.add_argument(
        "--prompt",
        type=Path,
        action="append",
        required=True,
        metavar="FILE",
        help="the text to go on from; of an experiment several, once for each",
    )
    command.add_argument("--tokens", type=count, required=True, metavar="N", help="tokens to decode")
    command.add_argument(
        "--pool", type=Path, metavar="DIR", help="where to keep the map of its experts (default: nowhere)"
    )
    add_options_of_a_run(command)
    command.add_argument(
        "--prefill-chunk", type=count, metavar="N", help="tokens of a pass over the prompt (default: as many as fit)"
    )
    command.add_argument(
        "--slots", type=byte_size, metavar="B", help="memory for the experts of one pass of a layer (default 1 GiB)"
    )
    command.add_argument(
        "--dtype",
        choices=("checkpoint", "float32"),
        default="checkpoint",
        help="what to compute in: the checkpoint's type (default), or float32",
    )
    command.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="what computes: the processor (default), or a GPU"
    )
    command.add_argument(
        "--placement",
        choices=("copy", "adopt"),
        help="with --device cuda: copy each expert to it while the last is computed (default), or let it read the "
        "host's pages in place, where it can",
    )
    command.add_argument(
        "--lookahead", action="store_true", help="also let each layer's input name the next layer's experts, as a plan"
    )
    command.add_argument(
        "--experiment",
        choices=("token-identity",),
        help="decode each prompt in three balanced pairs by --owner and --against: are tokens the same, who is faster",
    )
    command.add_argument(
        "--against", choices=OWNERS, default="restream", help="of token-identity: the other owner (default restream)"
    )
    command.add_argument(
        "--experiment-seed", type=count, metavar="N", help="of token-identity: of the third pair's order (default 0)"
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="write the routes as an open dump (.jsonl)")
    command.add_argument(
        "--data", type=Path, metavar="DIR", help="append each decode, and each pair, to the results of this data folder"
    )
    command.add_argument("--by-layer", action="store_true", help="also print where a token's time went, layer by layer")
    command.add_argument("--json", action="store_true", help="print one JSON document")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.set_defaults(run=_decode)


def _decode(arguments: argparse.Namespace) -> int:
    check_threads(arguments.threads)
    if not 2 <= arguments.tokens <= MOST_TOKENS:
        raise UnusableReplay(f"--tokens {arguments.tokens}, wanted 2 to {MOST_TOKENS:,}: the first comes of the prompt")
    if arguments.experiment is None:
        if len(arguments.prompt) > 1:
            raise UnusableReplay(f"{len(arguments.prompt)} prompts, wanted one; several belong to an --experiment")
        if arguments.against != "restream" or arguments.experiment_seed is not None:
            raise UnusableReplay("--against and --experiment-seed belong to an --experiment; leave them out")
    elif arguments.out is not None:
        raise UnusableReplay(
            "--out with --experiment, which decodes many times; leave it out, and decode once for routes"
        )
    if arguments.out is not None:
        _check_out(arguments.out)
    if arguments.placement is not None and arguments.device != "cuda":
        raise UnusableReplay(f"--placement {arguments.placement} belongs to --device cuda; leave it out, or add that")
    data = _data_folder(arguments.data)
    let_compute_threads_sleep()
    # Seconds of import, which other commands do without.
    from replayer.decoder import UnusableCheckpoint
    from replayer.device import NoAccelerator
    from replayer.placement import check_placement

    try:
        if arguments.device == "cuda":
            check_placement(arguments.placement or "copy")
        return _pairs(arguments, data) if arguments.experiment is not None else _one(arguments, data)
    except UnusableCheckpoint as error:
        # A class that this module's importers can do without.
        raise MalformedCheckpoint(str(error)) from error
    except NoAccelerator as error:
        raise UnusableReplay(str(error)) from error


def let_compute_threads_sleep() -> None:
    """Has torch's threads sleep between products, unless the environment says; call before torch is imported.

    By default they spin there, on the processors that the threads need which read experts: decoding from a warm page
    cache took 1.9 times as long as from tensors in memory, and 1.1 to 1.2 times with this (2 processors, `make bench`).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def _data_folder(root: Path | None) -> DataFolder | None:
    """The data folder, after a trial: a decode may take an hour. OSError where nothing can be written there."""
    if root is None:
        return None
    data = DataFolder(root)
    data.results.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=data.results):
        pass
    return data


def _one(arguments: argparse.Namespace, data: DataFolder | None) -> int:
    with _loaded(arguments) as (decoder, pool, prompts):
        one = _decoded(arguments, decoder, pool, prompts[0], request_of(arguments, destination="none"))
    if data is not None:
        told = told_of(arguments.model, arguments.prompt[0], prompts[0], arguments.tokens, decoder.family)
        write_decode(data, run_row(told, decoder, one, len(prompts[0])), one)
    if arguments.out is not None:
        write_routes(arguments.out, decoder.top_k, facts_of(decoder, one), routed_passes(one))
    if arguments.json:
        print(json.dumps(document_of(arguments, decoder, one, len(prompts[0]))))
    else:
        _print(decoder, one, len(prompts[0]), arguments.out, by_layer=arguments.by_layer)
    return 0 if one.run.run["bytes_valid"] and one.warm_sha256 in (None, one.decoded.sha256) else 1


@contextlib.contextmanager
def _loaded(arguments: argparse.Namespace) -> Iterator[tuple["Decoder", Pool, list[list[int]]]]:
    """The model, the map of its experts, and the prompts' tokens, all looked at before anything is decoded."""
    from replayer.decoder import load_decoder, read_prompt

    decoder = load_decoder(arguments.model, device=arguments.device, dtype=arguments.dtype)
    prompts = [read_prompt(path, decoder) for path in arguments.prompt]
    for prompt_ids in prompts:
        decoder.check(prompt_ids, arguments.tokens)
    for leftover in remove_leftovers():
        print(f"replayer: {leftover}", file=sys.stderr)
    with tempfile.TemporaryDirectory(prefix="expert-tier-decode-") as place:
        if arguments.pool is None:
            pool = map_pool(arguments.model, Path(place) / "pool", allow_unsuitable=True)
        elif arguments.pool.exists():
            pool = read_pool(arguments.pool)
        else:
            pool = map_pool(arguments.model, arguments.pool, allow_unsuitable=arguments.allow_unsuitable)
        yield decoder, pool, prompts


def _decoded(
    arguments: argparse.Namespace, decoder: "Decoder", pool: Pool, prompt_ids: list[int], request: Request
) -> "DecodeRun":
    from replayer.decode import decode

    return decode(
        decoder,
        pool,
        request,
        prompt_ids,
        arguments.tokens,
        prefill_chunk=arguments.prefill_chunk,
        slot_memory_bytes=arguments.slots,
        lookahead=arguments.lookahead,
        placement=(arguments.placement or "copy") if arguments.device == "cuda" else None,
        wait_s=arguments.wait,
    )


def _pairs(arguments: argparse.Namespace, data: DataFolder | None) -> int:
    """Decodes every pair; the document or its lines. 1 if a pair is void."""
    pairs_id = None
    requests = [request_of(arguments, destination="none")]
    requests.append(dataclasses.replace(requests[0], owner=arguments.against, policy=None))
    for request in requests:
        check_request(request)
    seed = arguments.experiment_seed or 0
    done: dict[tuple[int, int], dict[int, Arm]] = {}
    order: dict[tuple[int, int], list[str]] = {}
    with _loaded(arguments) as (decoder, pool, prompts):
        for turn in turns(len(prompts), seed):
            one = _decoded(arguments, decoder, pool, prompts[turn.prompt], requests[turn.arm])
            arm = _arm_of(one)
            done.setdefault((turn.prompt, turn.pair), {})[turn.arm] = arm
            order.setdefault((turn.prompt, turn.pair), []).append(arm.owner)
            pairs_id = pairs_id or arm.run_id
            if data is not None:
                told = told_of(
                    arguments.model,
                    arguments.prompt[turn.prompt],
                    prompts[turn.prompt],
                    arguments.tokens,
                    decoder.family,
                )
                write_decode(data, run_row(told, decoder, one, len(prompts[turn.prompt])), one)
                arms, place = done[turn.prompt, turn.pair], order[turn.prompt, turn.pair]
                if len(arms) == len(requests):
                    write_pair(data, pair_row(told, pairs_id, turn.pair, seed, (arms[0], arms[1]), place[0]))
            if not arguments.json:
                print(
                    f"{arguments.prompt[turn.prompt]}, pair {turn.pair}: {arm.owner}, tokens {arm.token_sha256[:12]}, "
                    f"{arm.decode_ns / 1e6:,.1f} ms, {arm.decode_wait_ns / 1e6:,.1f} of them waiting; times "
                    f"{'valid' if arm.time_valid else 'NOT valid'}",
                    flush=True,
                )
    pairs = [(prompt, arms[0], arms[1]) for (prompt, _), arms in done.items()]
    document = {
        "experiment": arguments.experiment,
        "model": str(arguments.model),
        "owner": arguments.owner,
        "against": arguments.against,
        "seed": seed,
        "tokens": arguments.tokens,
        "prompts": [str(path) for path in arguments.prompt],
        "pairs": [
            {
                "prompt": prompt,
                "pair": pair,
                "order": order[prompt, pair],
                "arms": [dataclasses.asdict(arms[0]), dataclasses.asdict(arms[1])],
                "void": void(arms[0], arms[1]),
                "time_ratio": time_ratio(arms[0], arms[1]),
            }
            for (prompt, pair), arms in done.items()
        ],
        "by_prompt": summary(pairs),
    }
    if arguments.json:
        print(json.dumps(document))
    else:
        _print_summary(document)
    return 0 if all(void(first, second) is None for _, first, second in pairs) else 1


def _arm_of(one: "DecodeRun") -> Arm:
    run = one.run.run
    return Arm(
        run_id=run["run_id"],
        owner=run["owner"],
        token_sha256=one.decoded.sha256,
        tokens=len(one.decoded.token_ids),
        degenerate=one.degenerate,
        bytes_valid=bool(run["bytes_valid"]),
        time_valid=bool(run["time_valid"]),
        warm_up_ns=one.warm_up_ns,
        prefill_ns=one.prefill_ns,
        decode_ns=one.decode_ns,
        decode_wait_ns=one.decode_wait_ns,
        device_bytes=run["device_bytes"],
    )


def _print_summary(document: dict[str, Any]) -> None:
    for row in document["by_prompt"]:
        name = document["prompts"][row["prompt"]]
        told = f"{name}: tokens identical in {row['identical_pairs']} of {row['pairs']} pairs"
        if row["time_ratio_median"] is None:
            print(f"{told}; no pair has valid times on both sides")
        else:
            print(
                f"{told}; {document['against']} took {row['time_ratio_median']:.3f} times as long as "
                f"{document['owner']} ({row['time_ratio_low']:.3f} to {row['time_ratio_high']:.3f} in "
                f"{row['timed_pairs']} pairs)"
            )
    for pair in document["pairs"]:
        if pair["void"] is not None:
            print(f"  void: {document['prompts'][pair['prompt']]}, pair {pair['pair']}: {pair['void']}")


def _check_out(out: Path) -> None:
    """Refuses, before an hour of decoding, a place that cannot be written to."""
    if out.is_dir():
        raise UnusableReplay(f"--out {out} is a folder, wanted a file to write; name one in it")
    if not out.parent.is_dir():
        raise UnusableReplay(f"--out {out}: its folder does not exist; make it, or choose another place")
    if out.exists() and not is_routes(out):
        raise UnusableReplay(f"--out {out}: a file that is no open dump, and it would be lost; choose another name")


def facts_of(decoder: "Decoder", one: "DecodeRun") -> dict[str, Any]:
    """Keys of the header of the dump that a decode writes."""
    metadata = one.trace.metadata
    return {
        "model": decoder.family,
        "engine": metadata.engine,
        "capture_method": metadata.capture_method,
        "num_experts": max(decoder.experts_per_layer.values()),
        "moe_layer_ids": list(decoder.moe_layer_ids),
        "top_k_model": decoder.top_k,
        "expert_bytes": metadata.expert_bytes,
        "id_space": "logical",
        "rank_known": True,
    }


def routed_passes(one: "DecodeRun") -> list[RoutedPass]:
    """The passes of the measured decode, as they are written."""
    return [
        RoutedPass(
            passed.phase,
            passed.first_position,
            [
                RoutedLayer(event.layer_id, event.expert_ids, event.weights, event.predicted_expert_ids)
                for event in passed.events
            ],
        )
        for passed in one.decoded.passes
    ]


def document_of(arguments: argparse.Namespace, decoder: "Decoder", one: "DecodeRun", prompt: int) -> dict[str, Any]:
    """What `--json` prints: `schemas.documents.DecodedRun`."""
    run = one.run
    from replayer.decoder import text_of

    whole = {"reclaim": next(iter(run.reclaim), None), "delivered": None}
    return {
        "model": str(arguments.model),
        "family": decoder.family,
        "computed_by": decoder.computed_by,
        "dtype": str(decoder.dtype).removeprefix("torch."),
        "prompt_tokens": prompt,
        "token_ids": list(one.decoded.token_ids),
        "text": text_of(one.decoded.token_ids, decoder),
        "token_sha256": one.decoded.sha256,
        "warm_token_sha256": one.warm_sha256,
        "degenerate": one.degenerate,
        "warm_up_ns": one.warm_up_ns,
        "prefill_ns": one.prefill_ns,
        "prefill_wait_ns": one.prefill_wait_ns,
        "decode_ns": one.decode_ns,
        "decode_wait_ns": one.decode_wait_ns,
        "layers": one.layers,
        "out": None if arguments.out is None else str(arguments.out),
        "run": {**run.run, **whole, "proofs": run.proofs},
    }


def _print(decoder: "Decoder", one: "DecodeRun", prompt: int, out: Path | None, *, by_layer: bool) -> None:
    from replayer.decoder import text_of

    decoded, run = one.decoded, one.run.run
    steps = len(decoded.token_ids) - 1
    print(f"{decoder.family}: {prompt:,} tokens of prompt, {len(decoded.token_ids):,} decoded")
    print(f"  {text_of(decoded.token_ids, decoder)!r}")
    print(f"  SHA-256 of the tokens {decoded.sha256}")
    if one.degenerate:
        print("  degenerate: one token repeats, so this says nothing about routing")
    if one.warm_sha256 not in (None, decoded.sha256):
        print("  NOT the tokens of the warm-up decode: what was read, or computed, differs")
    for what, whole, wait, count_of in (
        ("prefill", one.prefill_ns, one.prefill_wait_ns, 1),
        ("a token", one.decode_ns, one.decode_wait_ns, steps),
    ):
        print(
            f"  {what:<10} {whole / count_of / 1e6:>10.2f} ms, {wait / count_of / 1e6:.2f} of it waiting for experts "
            f"of {run['owner']}"
        )
    if by_layer:
        for row in one.layers:
            if row["phase"] == "decode":
                wait, compute = row["wait_ns"] / steps / 1e6, row["compute_ns"] / steps / 1e6
                print(f"    layer {row['layer_id']:<5} waited {wait:>8.2f} ms, computed {compute:>8.2f} ms a token")
    print_verdicts(one.run)
    if out is not None:
        print(f"  routes → {out}")
