"""Certificate files that cannot be used: each fault with its file, before anything heavy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import serialization

from trioserve.errors import ConfigError
from trioserve.http.tls import Tls

PASSPHRASE = b"very secret"


@pytest.fixture(scope="module")
def issued() -> trustme.LeafCert:
    return trustme.CA().issue_cert("localhost")


@pytest.fixture
def cert(issued: trustme.LeafCert, tmp_path: Path) -> str:
    path = tmp_path / "cert.pem"
    path.write_bytes(issued.cert_chain_pems[0].bytes())
    return str(path)


@pytest.fixture
def key(issued: trustme.LeafCert, tmp_path: Path) -> str:
    path = tmp_path / "key.pem"
    path.write_bytes(issued.private_key_pem.bytes())
    return str(path)


def fault(cert: str, key: str | None, client_ca: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        Tls(cert, key, client_ca, http2=False)
    [problem] = caught.value.problems
    assert "\n" not in problem
    return problem


def test_good_files(cert: str, key: str, issued: trustme.LeafCert, tmp_path: Path) -> None:
    Tls(cert, key, None, http2=False)
    Tls(cert, key, cert, http2=True)
    both = tmp_path / "both.pem"
    both.write_bytes(issued.private_key_and_cert_chain_pem.bytes())
    Tls(str(both), None, None, http2=False)


def test_missing_files(cert: str, key: str, tmp_path: Path) -> None:
    nothing = str(tmp_path / "nothing")
    for given, setting in [
        ((nothing, key, None), "tls_cert"),
        ((cert, nothing, None), "tls_key"),
        ((cert, key, nothing), "tls_client_ca"),
    ]:
        assert (
            fault(*given) == f"http.{setting} {nothing}: cannot be read: No such file or directory"
        )


def test_files_of_another_kind(cert: str, key: str, tmp_path: Path) -> None:
    assert "holds no certificate" in fault(key, key)
    assert fault(cert, cert) == f"http.tls_key {cert}: holds no private key"
    assert fault(cert, None) == f"http.tls_cert {cert}: holds no private key"
    assert "tls_client_ca" in fault(cert, key, key)
    der = tmp_path / "der"
    der.write_bytes(b"\x30\x82\x01\x00")
    assert "is not PEM" in fault(str(der), key)
    os.mkfifo(tmp_path / "fifo")
    assert "not a regular file" in fault(cert, str(tmp_path / "fifo"))


def test_key_of_another_certificate(cert: str, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(trustme.CA().issue_cert("localhost").private_key_pem.bytes())
    assert fault(cert, str(other)).startswith(
        f"http.tls_key {other}: is not the key of the certificate in {cert}"
    )


def test_encrypted_key(cert: str, key: str, tmp_path: Path) -> None:
    plain = serialization.load_pem_private_key(Path(key).read_bytes(), None)
    formats = serialization.PrivateFormat
    for number, form in enumerate((formats.PKCS8, formats.TraditionalOpenSSL)):
        path = tmp_path / f"encrypted{number}"
        path.write_bytes(
            plain.private_bytes(
                serialization.Encoding.PEM,
                form,
                serialization.BestAvailableEncryption(PASSPHRASE),
            )
        )
        assert fault(cert, str(path)).startswith(
            f"http.tls_key {path}: the private key is encrypted"
        )


def test_broken_contents(cert: str, key: str, tmp_path: Path) -> None:
    text = Path(cert).read_text()
    broken = tmp_path / "broken"
    for content in (text.replace("M", "!"), text[:200], text.replace("END", "ENT")):
        broken.write_text(content)
        assert str(broken) in fault(str(broken), key)
        assert str(broken) in fault(cert, key, str(broken))


def test_a_bad_file_ends_the_start_at_once(cert: str, tmp_path: Path) -> None:
    began = time.monotonic()
    command = f"{sys.executable} -m trioserve run --port 0 --set device.kind=simulated --set"
    done = subprocess.run(
        [*command.split(), f"http.tls_cert={cert}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=30,
    )
    assert done.returncode == ConfigError.exit_code
    [line] = done.stderr.splitlines()
    assert f"http.tls_cert {cert}: holds no private key" in line
    assert time.monotonic() - began < 10
