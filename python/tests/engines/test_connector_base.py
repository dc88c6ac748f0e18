"""The connector against the base classes of the vLLM that is installed."""

from __future__ import annotations

import inspect

import pytest

pytest.importorskip("vllm", reason="needs vllm (see make engines)")

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, SupportsHMA

import kvtier.vllm


def test_nothing_abstract_is_left() -> None:
    cls = kvtier.vllm.KvtierConnector
    assert issubclass(cls, KVConnectorBase_V1) and issubclass(cls, SupportsHMA)
    assert not cls.__abstractmethods__


def test_hooks_take_what_the_engine_gives() -> None:
    for name, mine in vars(kvtier.vllm.KvtierConnector).items():
        theirs = getattr(KVConnectorBase_V1, name, None) or getattr(SupportsHMA, name, None)
        if name.startswith("_") or theirs is None or isinstance(theirs, property):
            continue
        if isinstance(mine, classmethod):
            mine = mine.__func__
            theirs = theirs.__func__
        want = list(inspect.signature(theirs).parameters)
        assert list(inspect.signature(mine).parameters)[: len(want)] == want, name
