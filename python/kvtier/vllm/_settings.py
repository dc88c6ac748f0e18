"""What an operator may set in ``kv_connector_extra_config``."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger("vllm.kvtier")

#: Keys of kv_connector_extra_config that vLLM itself or a wrapping connector puts there.
_FOREIGN = frozenset({"shared_storage_path", "spec_name", "spec_module_path"})


@dataclasses.dataclass(frozen=True)
class Settings:
    """The connector's configuration, checked.

    Attributes:
        address: ``unix:PATH`` of ``kvtier serve --socket``, or HOST:PORT of ``--xfer``.
        token: what the server's access file knows this engine by; None where it asks for none.
        namespace: name of the namespace; None derives one from everything that makes blocks
            alike, so that engines that differ live side by side. With a name of one's own a
            difference is no hit and one log line that names the field.
        timeout: seconds until a load, a store or the answer to a lookup is given up.
        lookup_wait: seconds for which one call of the scheduler waits for a lookup; when it
            is not answered by then the request is asked about again in the next step.
        lease: seconds for which found blocks are kept from eviction until they are loaded.
        durable: True: a block counts as stored when it is on NVMe. False: the server's memory
            is enough; the server brings blocks down by its own policy and when it is drained.
        staging_bytes: host memory between the KV cache and the server, half of it for loads
            and half for stores. A store that finds no room in it is dropped and counted.
        save_wait: seconds for which one step may wait for room in it.
    """

    address: str
    token: str | None = None
    namespace: str | None = None
    timeout: float = 10.0
    lookup_wait: float = 0.002
    lease: float = 10.0
    durable: bool = False
    staging_bytes: int = 1 << 30
    save_wait: float = 0.02

    @classmethod
    def parse(cls, extra: Mapping[str, Any]) -> Settings:
        """Checks the configuration; a wrong value is a ValueError that names its key."""
        fields = {f.name: f for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for key, value in extra.items():
            if key not in fields:
                if key not in _FOREIGN:
                    log.warning("kvtier: kv_connector_extra_config has an unknown key %r, which is ignored", key)
                continue
            if value is None:
                continue
            values[key] = value
        if not isinstance(values.get("address"), str) or not values["address"]:
            raise ValueError(
                "kvtier: kv_connector_extra_config needs address: "
                "unix:PATH of `kvtier serve --socket`, or HOST:PORT of --xfer"
            )
        for key in ("token", "namespace"):
            if key in values and not isinstance(values[key], str):
                raise ValueError(f"kvtier: {key} is {values[key]!r}, not a text")
        for key in ("timeout", "lookup_wait", "lease", "save_wait"):
            if key in values:
                values[key] = _number(key, values[key])
        if "durable" in values and not isinstance(values["durable"], bool):
            raise ValueError(f"kvtier: durable is {values['durable']!r}, not true or false")
        if "staging_bytes" in values:
            values["staging_bytes"] = int(_number("staging_bytes", values["staging_bytes"]))
        return cls(**values)


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value < 0 or value != value:
        raise ValueError(f"kvtier: {key} is {value!r}, not a number of at least 0")
    return float(value)
