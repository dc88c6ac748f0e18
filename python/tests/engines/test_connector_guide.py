"""docs/vllm.md says what is so."""

from __future__ import annotations

import dataclasses
import json
import re

from connector_rig import PACKAGE, transfer
from kvtier.vllm._counters import COUNTERS, DURATIONS
from kvtier.vllm._settings import Settings

GUIDE = (PACKAGE.parent / "docs" / "vllm.md").read_text()


def test_configurations_are_those_of_the_tests() -> None:
    connector, tier = (json.loads(text) for text in re.findall(r"--kv-transfer-config '(\{.*?\})'\n", GUIDE, re.DOTALL))
    assert connector == transfer("unix:/run/kvtier.sock")
    assert Settings.parse(connector["kv_connector_extra_config"]).address == "unix:/run/kvtier.sock"
    (secondary,) = tier["kv_connector_extra_config"]["secondary_tiers"]
    assert (secondary["type"], secondary["module_path"]) == ("KvtierTier", "kvtier.vllm")


def test_keys_and_their_defaults() -> None:
    table = {name: text.strip() for name, text in re.findall(r"^\| `(\w+)` \|([^|]*)\|", GUIDE, re.MULTILINE)}
    fields = {f.name: f.default for f in dataclasses.fields(Settings)}
    assert fields.keys() <= table.keys()
    for name in ("timeout", "lookup_wait", "save_wait", "lease"):
        assert float(table[name]) == fields[name], name
    assert (table["durable"], table["staging_bytes"]) == (str(fields["durable"]).lower(), "1 GiB")
    assert fields["staging_bytes"] == 1 << 30


def test_metrics_are_listed() -> None:
    section = GUIDE[GUIDE.index("## Metrics") :]
    assert all(f"`{name}`" in section for name in (*COUNTERS, *DURATIONS))
