"""Clients that may not do everything."""

import hashlib
import json
import subprocess

import pytest

import kvtier
from conftest import fresh_name, hashes


def test_denied(daemons, binary, tmp_path):
    if "--access" not in subprocess.run([binary, "serve", "--help"], stdout=subprocess.PIPE, text=True).stdout:
        pytest.skip("this kvtier has no --access")

    def digest(token):
        return hashlib.sha256(token.encode()).hexdigest()

    access = tmp_path / "access.json"
    access.write_text(
        json.dumps(
            {
                "identities": [
                    {"name": "all", "token_sha256": digest("all"), "read": ["*"], "write": ["*"]},
                    {"name": "reader", "token_sha256": digest("reader"), "read": ["team-*"], "write": []},
                    {"name": "team", "token_sha256": digest("team"), "read": ["*"], "write": ["team-*"]},
                ]
            }
        )
    )
    d = daemons(extra=["--access", str(access)])
    with pytest.raises(kvtier.DeniedError):
        kvtier.connect(d.unix, token="wrong", required=True)
    with kvtier.connect(d.unix, token="all", required=True) as everything:
        assert everything.shared
        ns = everything.open("team-a", max_block_bytes=100)
        everything.open("private", max_block_bytes=100)
        assert ns.put(hashes(1), [b"x"])[0].stored
        with kvtier.connect(d.unix, token="reader", required=True) as reader:
            assert reader.shared  # it is given the memory of what it may read, for reading
            seen = reader.open("team-a", create=False)
            out = bytearray(1)
            assert seen.get_into(hashes(1), [out])[0].hit and out == b"x"
            assert reader.stats().in_place == 1
            with seen.lease_read(hashes(1), 10) as loan:
                assert bytes(loan.views[0]) == b"x" and loan.views[0].readonly
            with pytest.raises(kvtier.DeniedError):
                seen.put(hashes(1, seed=1), [b"y"])
            with pytest.raises(kvtier.DeniedError):
                seen.report_prefill(0, 1, 1.0)
            assert seen.match(hashes(1), conversation="chat").prefix == 1
            assert seen.prefetch(hashes(1), priority=9) == ["hit"]
            with pytest.raises(kvtier.DeniedError):
                reader.open(fresh_name(), max_block_bytes=100)
            with pytest.raises(kvtier.DeniedError):
                reader.open("private", create=False)
            assert seen.match(hashes(1)).prefix == 1
        with kvtier.connect(d.unix, token="team", required=True) as team:
            assert team.shared
            seen = team.open("team-a", create=False)
            assert seen.get_into(hashes(1), [out])[0].hit and out == b"x"
            assert team.stats().in_place == 1
            with seen.lease_read(hashes(1), 10) as loan:
                assert bytes(loan.views[0]) == b"x"
            assert seen.put(hashes(1, seed=1), [b"y"])[0].stored
            reservations = seen.reserve([1])
            reservations[0].buffer[:] = b"z"
            assert seen.commit(reservations, hashes(1, seed=2))[0].stored
            assert team.stats().in_place > 1
            assert ns.get_into(hashes(1, seed=2), [out])[0].hit and out == b"z"
