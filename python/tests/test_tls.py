"""Sessions over TLS."""

import shutil
import socket
import ssl
import subprocess
import threading
import time

import pytest

import kvtier
from conftest import PATIENCE, fresh_name, hashes, pattern
from kvtier import _wire as wire
from kvtier._dial import TlsStream
from kvtier._outbox import Outbox


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("no openssl to make a certificate")
    path = tmp_path_factory.mktemp("tls")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
        + ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
        + ["-keyout", str(path / "key.pem"), "-out", str(path / "cert.pem")],
        check=True,
        stderr=subprocess.DEVNULL,
    )
    return path / "cert.pem", path / "key.pem"


def test_tls(daemons, certificate):
    d = daemons(tls=certificate)
    context = ssl.create_default_context(cafile=str(certificate[0]))
    with pytest.raises(kvtier.DisconnectedError):
        kvtier.connect(d.tcp, tls=ssl.create_default_context(), required=True)
    with kvtier.connect(d.tcp, tls=context, required=True) as pool:
        ns = pool.open(fresh_name(), max_block_bytes=4 << 20)
        wrong = []

        def work(seed):
            keys = hashes(4, seed=seed)
            blocks = [pattern((1 << 20) + seed, seed * 10 + i) for i in range(4)]
            out = [bytearray(len(b)) for b in blocks]
            for _ in range(5):
                if not all(r.ok for r in ns.put(keys, blocks)):
                    wrong.append("put")
                if not all(r.hit for r in ns.get_into(keys, out)) or [bytes(o) for o in out] != blocks:
                    wrong.append("get")

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
        assert not wrong and pool.stats().reconnects == 0


def test_what_openssl_took_is_sent_first(certificate):
    """A record that OpenSSL has made but not written cannot be given up: the next bytes would
    be taken for sent in its place. The session ends instead."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(*certificate)
    client = ssl.create_default_context(cafile=str(certificate[0]))
    listener = socket.create_server(("127.0.0.1", 0))
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16384)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16384)
    greeting = threading.Thread(target=lambda: accepted.append(server.wrap_socket(theirs, server_side=True)))
    accepted = []
    greeting.start()
    stream = TlsStream(client.wrap_socket(ours, server_hostname="localhost"))
    greeting.join(PATIENCE)
    stream.sock.setblocking(False)

    class Session:
        error = None
        io_thread = 0

        def end(self, error):
            self.error = error

        def lost(self):
            return self.error

    session = Session()
    out = Outbox(session, stream, iter(range(1, 100)))
    assert not stream.owes
    with pytest.raises(kvtier.DeadlineError):
        while True:
            out.send([wire.message(wire.MATCH, 1, bytes(16000))], time.monotonic() + 0.05)
    assert stream.owes and session.error is not None
    with pytest.raises(kvtier.DisconnectedError):
        out.send([b"something else"], time.monotonic() + 1.0)
    for s in (stream.sock, accepted[0], listener):
        s.close()
