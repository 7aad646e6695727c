"""What a synthetic pool holds: incompressible bytes that are a function of (layer, expert, offset).

Any page of any expert can be made again from its place alone, so a read can be checked without a second copy. No
files and no threads here; every function runs without the interpreter lock.
"""

import numba
import numpy as np
import numpy.typing as npt

CONTENT_VERSION = 1
"""Raised when the same (layer, expert, offset) means other bytes."""

EDGE_BYTES = 64
"""Bytes from the start and from the end of an expert that enter a digest."""


@numba.njit(cache=True, nogil=True, inline="always")
def mix(word):  # type: ignore[no-untyped-def]
    """SplitMix64's output function (Steele, Lea, Flood 2014): a bijection of 64 bits that scatters close inputs."""
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return word ^ (word >> np.uint64(31))


@numba.njit(cache=True, nogil=True)
def expert_key(layer_id, expert_id):  # type: ignore[no-untyped-def]
    """uint64 that names an expert's bytes; `layer_id` is the model's own layer number."""
    return mix((np.uint64(layer_id) << np.uint64(32)) ^ np.uint64(expert_id) ^ np.uint64(0x9E3779B97F4A7C15))


@numba.njit(cache=True, nogil=True)
def word_at(key, index):  # type: ignore[no-untyped-def]
    """uint64 number `index` of the expert, stored little-endian at offset 8 × index."""
    return mix(np.uint64(key) + np.uint64(index) * np.uint64(0x9E3779B97F4A7C15))


@numba.njit(cache=True, nogil=True)
def fill(out, key, first_word):  # type: ignore[no-untyped-def]
    """Writes the expert's bytes from offset 8 × `first_word` on into `out`, (n,) uint8 at an address of 8 bytes."""
    words = out[: len(out) // 8 * 8].view(np.uint64)
    for index in range(len(words)):
        words[index] = word_at(key, first_word + index)
    if len(out) % 8:
        last = word_at(key, first_word + len(words))
        for byte in range(len(words) * 8, len(out)):
            out[byte] = np.uint8(last & np.uint64(0xFF))
            last >>= np.uint64(8)


@numba.njit(cache=True, nogil=True)
def wrong_words(found, key, first_word):  # type: ignore[no-untyped-def]
    """Words of `found`, (n,) uint8, that are not the expert's from offset 8 × `first_word` on; a tail counts as one."""
    wrong = 0
    words = found[: len(found) // 8 * 8].view(np.uint64)
    for index in range(len(words)):
        wrong += words[index] != word_at(key, first_word + index)
    if len(found) % 8:
        last = word_at(key, first_word + len(words))
        differs = False
        for byte in range(len(words) * 8, len(found)):
            differs |= found[byte] != np.uint8(last & np.uint64(0xFF))
            last >>= np.uint64(8)
        wrong += differs
    return wrong


@numba.njit(cache=True, nogil=True)
def _fold(seed, edge):  # type: ignore[no-untyped-def]
    """uint64 that folds `edge`, (n,) uint8, into `seed`, eight bytes at a time; the address may be any."""
    word = np.uint64(0)
    for byte in range(len(edge)):
        word |= np.uint64(edge[byte]) << np.uint64(8 * (byte % 8))
        if byte % 8 == 7 or byte == len(edge) - 1:
            seed = mix(seed ^ word)
            word = np.uint64(0)
    return mix(seed ^ np.uint64(len(edge)))


@numba.njit(cache=True, nogil=True)
def access_digest(event_id, layer_id, expert_id, first_edge, last_edge):  # type: ignore[no-untyped-def]
    """uint64 of one access: its place in the trace and the first and last EDGE_BYTES that were read.

    The digest of a run is the sum of its accesses' modulo 2^64, so the order of reads does not enter it.
    """
    seed = mix(np.uint64(event_id) + np.uint64(0x9E3779B97F4A7C15)) ^ expert_key(layer_id, expert_id)
    return _fold(_fold(seed, first_edge), last_edge)


def bytes_of(layer_id: int, expert_id: int, offset_bytes: int, length_bytes: int) -> npt.NDArray[np.uint8]:
    """(length_bytes,) uint8 of an expert from any offset on."""
    skip = offset_bytes % 8
    out = np.empty(skip + length_bytes, dtype=np.uint8)
    # numba gives back a bare int, which it would take for a signed one.
    fill(out, np.uint64(expert_key(layer_id, expert_id)), offset_bytes // 8)
    return out[skip:]
