"""What vLLM is told by name: the connector (``kv_connector_module_path``) and the secondary tier (``module_path``).

Importing this module imports no engine; asking for a class does.
"""

from __future__ import annotations

import importlib
from typing import Any

_CLASSES = {"KvtierConnector": ".connector", "KvtierTier": ".tier"}

__all__ = sorted(_CLASSES)


def __getattr__(name: str) -> Any:
    if name not in _CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_CLASSES[name], __name__), name)


def register() -> None:
    """Make the tier's name known to vLLM 0.25 to 0.27, whose configuration knows no module_path.

    vLLM calls it at its start: it is the package's entry point in vllm.general_plugins.
    """
    try:
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

        SecondaryTierFactory.register_tier("KvtierTier", __name__, "KvtierTier")
    except (ImportError, ValueError):  # a version without tiers; registered before
        pass
