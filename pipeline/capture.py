"""From a model and prompts to dumps of its routes: decoded with nothing limited, experts from the page cache.

The decode is `replayer.decode`'s, the dump's layout the open format; what becomes of a dump is `ingest`'s.
"""

import hashlib
import re
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from replayer.checkpoints import MalformedCheckpoint
from replayer.decode import decode
from replayer.decode_cli import facts_of, routed_passes
from replayer.decoder import UnusableCheckpoint, load_decoder, read_prompt
from replayer.pool import map_pool
from replayer.request import Request
from replayer.routes import write_routes

WAIT_S = 60
"""For a replay that holds the machine."""
_REQUEST = Request(warm_pass=False, destination="none", allow_unsuitable=True)


def capture(
    model: Path,
    prompts: Sequence[Path],
    tokens: int,
    folder: Path,
    *,
    dtype: Literal["checkpoint", "float32"] = "checkpoint",
    lookahead: bool = False,
) -> Iterator[Path]:
    """Decodes each prompt once and writes its routes below `folder`; every prompt is looked at before the first.

    A file is named after model, prompt and the SHA-256 of what was decoded, so the same capture is the same file.

    Raises:
        MalformedCheckpoint: the model or a prompt cannot be decoded. OSError: a file cannot be read or written. As
        `replayer.replay.replay_as_asked` besides.
    """
    try:
        decoder = load_decoder(model, dtype=dtype)
        token_ids = [read_prompt(path, decoder) for path in prompts]
        for one in token_ids:
            decoder.check(one, tokens)
        with tempfile.TemporaryDirectory(prefix="expert-tier-capture-") as place:
            pool = map_pool(model, Path(place) / "pool", allow_unsuitable=True)
            for path, prompt_ids in zip(prompts, token_ids, strict=True):
                one_run = decode(decoder, pool, _REQUEST, prompt_ids, tokens, lookahead=lookahead, wait_s=WAIT_S)
                said = f"{prompt_ids} {tokens} {one_run.decoded.sha256} {dtype} {lookahead}"
                digest = hashlib.sha256(said.encode()).hexdigest()[:12]
                target = folder / f"{_slug(model.resolve().name)}-{_slug(path.stem)}-{digest}.routes.jsonl"
                write_routes(target, decoder.top_k, facts_of(decoder, one_run), routed_passes(one_run))
                yield target
    except UnusableCheckpoint as error:
        raise MalformedCheckpoint(str(error)) from error


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:40] or "unnamed"
