"""Callers' memory as flat memoryviews of bytes, and the checksum that blocks carry."""

from __future__ import annotations

from typing import Any

from xxhash import xxh3_128, xxh3_128_digest

from ._errors import InvalidError

# Bytes that are copied before they are hashed: they are in the cache then.
STEP = 256 << 10


def view_of(buffer: Any, writable: bool, what: str = "buffer") -> memoryview:
    """The bytes of an object, without copying them.

    Takes what has the buffer protocol and is C-contiguous, what has
    `__array_interface__`, and tensors on the CPU (`data_ptr`, `nbytes`, `is_contiguous`).
    The view keeps the object alive. InvalidError names what is wrong with it; TypeError
    when it is no memory at all.
    """
    try:
        m = memoryview(buffer)
    except (TypeError, BufferError, ValueError):
        return _foreign(buffer, writable, what)
    if not m.c_contiguous:
        raise InvalidError(f"{what} is not contiguous")
    if writable and m.readonly:
        raise InvalidError(f"{what} is read-only")
    if m.format != "B" or m.ndim != 1:
        if m.nbytes == 0:
            return memoryview(b"")
        try:
            m = m.cast("B")
        except (TypeError, ValueError):
            return _foreign(buffer, writable, what)
    return m


def _foreign(buffer: Any, writable: bool, what: str) -> memoryview:
    if callable(getattr(buffer, "data_ptr", None)):
        device = getattr(buffer, "device", None)
        kind = getattr(device, "type", "cpu")
        if kind != "cpu":
            raise InvalidError(f"{what} is on {kind}, not on the CPU")
        if not buffer.is_contiguous():
            raise InvalidError(f"{what} is not contiguous")
        return _at(buffer.data_ptr(), int(buffer.nbytes), buffer, False)
    interface = getattr(buffer, "__array_interface__", None)
    if interface is not None:
        address, readonly = interface["data"]
        if interface.get("strides") is not None:
            raise InvalidError(f"{what} is not contiguous")
        if writable and readonly:
            raise InvalidError(f"{what} is read-only")
        n = int(interface["typestr"][2:])
        for extent in interface["shape"]:
            n *= extent
        return _at(address, n, buffer, bool(readonly))
    raise TypeError(f"{what}: {type(buffer).__name__} is no memory of bytes")


def _at(address: int, n: int, owner: Any, readonly: bool) -> memoryview:
    import ctypes

    if n == 0:
        return memoryview(b"")
    array = (ctypes.c_ubyte * n).from_address(address)
    setattr(array, "owner", owner)  # the view keeps the array, the array keeps the memory
    m = memoryview(array).cast("B")
    return m.toreadonly() if readonly else m


def sum_of(view: memoryview) -> bytes:
    """The checksum of a block: xxh3-128, the high bytes first."""
    return xxh3_128_digest(view)


def copy_sum(dst: memoryview, src: memoryview) -> bytes:
    """Copies src to dst, of the same length, and returns the checksum of what is there."""
    n = len(src)
    if n <= STEP:
        dst[:] = src
        return xxh3_128_digest(dst)
    h = xxh3_128()
    for at in range(0, n, STEP):
        part = dst[at : at + STEP]
        part[:] = src[at : at + STEP]
        h.update(part)
    return h.digest()
