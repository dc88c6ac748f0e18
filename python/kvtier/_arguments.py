"""Checks of what callers give."""

from __future__ import annotations

from typing import List, Optional, Sequence, Union, cast

from . import _wire as wire
from ._dial import Region
from ._errors import InvalidError
from ._results import Tier
from ._puts import PutOptions

# Of one key: (region, offset, length), or several of them.
Segments = Union[wire.Segment, Sequence[wire.Segment]]

_LENGTHS = set(wire.HASH_LENGTHS)
_LONGEST_TTL = 1e11  # seconds


def hashes_of(hashes: Sequence[bytes]) -> List[bytes]:
    """The hashes of a call, of one length that hashes have."""
    if isinstance(hashes, (bytes, bytearray, memoryview, str)):
        raise TypeError("hashes: want a sequence of bytes, one for each key")
    keys = list(hashes)
    if not keys:
        return keys
    if list(map(type, keys)).count(bytes) != len(keys):
        for i, k in enumerate(keys):
            if not isinstance(k, (bytes, bytearray, memoryview)):
                raise TypeError(f"hash {i}: {type(k).__name__}, want bytes")
        keys = [bytes(k) for k in keys]
    lengths = list(map(len, keys))
    if lengths[0] not in _LENGTHS or lengths.count(lengths[0]) != len(keys):
        raise InvalidError(f"hashes of {sorted(set(lengths))} bytes: want 8, 16, 20 or 32, all the same")
    return keys


def parts_of(most: int, keys: Sequence[bytes]) -> List[Sequence[bytes]]:
    """Keys cut into what messages take."""
    return [keys] if len(keys) <= most else [keys[i : i + most] for i in range(0, len(keys), most)]


def parents_of(
    keys: Sequence[bytes], parents: Optional[Sequence[Optional[bytes]]]
) -> Optional[List[Optional[bytes]]]:
    """A copy of the parents, which must go with their keys."""
    if parents is None:
        return None
    parents = list(parents)
    if len(parents) != len(keys):
        raise InvalidError(f"{len(keys)} hashes and {len(parents)} parents")
    for i, p in enumerate(parents):
        if p is not None and not isinstance(p, bytes):
            raise TypeError(f"parent {i}: {type(p).__name__}, want bytes")
        if p is not None and len(p) != len(keys[0]):
            raise InvalidError(f"parent {i} of {len(p)} bytes, hashes of {len(keys[0])}")
    return parents


def put_options(durable: bool, ttl: float) -> PutOptions:
    """The options of a put as messages tell them."""
    return PutOptions(Tier.NVME if durable else Tier.MEMORY, ttl_ms(ttl))


def ttl_ms(ttl: float) -> int:
    """How long a block lives, as messages tell it."""
    if not 0 <= ttl <= _LONGEST_TTL:
        raise InvalidError(f"ttl: {ttl} s")
    return int(ttl * 1000 + 0.999)


def text_of(key: str, value: object) -> str:
    """Text that a message takes."""
    if not isinstance(value, str):
        raise TypeError(f"{key}: {type(value).__name__}, want str")
    try:
        n = len(value.encode())
    except UnicodeEncodeError as e:
        raise InvalidError(f"{key}: {e}") from None
    if n > wire.MAX_TEXT:
        raise InvalidError(f"{key}: longer than {wire.MAX_TEXT} bytes")
    return value


def conversation_of(name: Optional[str]) -> str:
    """The name of a conversation as messages tell it, "" for none."""
    if name is None:
        return ""
    n = len(text_of("conversation", name).encode())
    if n > wire.MAX_CONVERSATION:
        raise InvalidError(f"conversation: {n} bytes, at most {wire.MAX_CONVERSATION}")
    return name


def number_of(key: str, n: int, least: int, most: int) -> int:
    """An integer between bounds."""
    if not isinstance(n, int):
        raise TypeError(f"{key}: {type(n).__name__}, want int")
    if not least <= n <= most:
        raise InvalidError(f"{key}: {n}, want {least} to {most}")
    return n


def segments_of(
    keys: Sequence[bytes], segments: Sequence[Segments], regions: Sequence[Region], sizes: Sequence[int], write: bool
) -> List[Sequence[wire.Segment]]:
    """The segments of each key, all within the pool's regions."""
    if len(keys) != len(segments):
        raise InvalidError(f"{len(keys)} hashes and {len(segments)} lists of segments")
    lists: List[Sequence[wire.Segment]] = []
    for i, one in enumerate(segments):
        # A copy: a job must not see what its caller does to the list.
        some = cast("Sequence[wire.Segment]", [one] if one and isinstance(one[0], int) else list(one))
        if not 1 <= len(some) <= wire.MAX_SEGMENTS:
            raise InvalidError(f"segments of key {i}: {len(some)}, want 1 to {wire.MAX_SEGMENTS}")
        for segment in some:
            if len(segment) != 3:
                raise InvalidError(f"segments of key {i}: {segment!r}, want (region, offset, length)")
            region, offset, length = segment
            if not isinstance(region, int) or not isinstance(offset, int) or not isinstance(length, int):
                raise TypeError(f"segments of key {i}: {segment!r}, want three int")
            if not 0 <= region < len(sizes):
                raise InvalidError(f"segments of key {i}: no region {region}, the pool has {len(sizes)}")
            if offset < 0 or not 0 < length <= 0xFFFFFFFF or offset + length > sizes[region]:
                raise InvalidError(
                    f"segments of key {i}: {length} bytes at {offset} of region {region}, which has {sizes[region]}"
                )
            if write and regions[region].readonly:
                raise InvalidError(f"segments of key {i}: region {region} is read-only")
        lists.append(some)
    return lists
