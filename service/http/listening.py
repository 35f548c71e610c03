"""What a server listens with: the certificate of HTTPS, and the file of a Unix socket. Knows no route."""

import os
import socket
import ssl
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.remote.address import read_private

SOCKET_MODE = 0o660  # for the user and the group: a proxy of another user on this machine gets that group


def tls_context(certfile: Path | None, keyfile: Path | None) -> ssl.SSLContext | None:
    """None: plain HTTP. keyfile None: the key is in the certificate's file. Raises ConfigError for bad files."""
    if certfile is None:
        return None
    private, flag = (certfile, "--ssl-certfile") if keyfile is None else (keyfile, "--ssl-keyfile")
    read_private(private, flag)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certfile, keyfile, password="")  # else a key with a password asks the terminal for it
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{flag} {private} holds another key than that of the certificate {certfile}") from None
        held = f"--ssl-certfile {certfile}" if keyfile is None else f"--ssl-certfile {certfile} and {flag} {keyfile}"
        raise ConfigError(f"{held} need a certificate and its key without a password, in PEM: {error}") from None
    except OSError as error:
        raise ConfigError(f"--ssl-certfile {certfile} cannot be read: {error.strerror}") from None
    return context


def unix_socket(path: Path) -> socket.socket:
    """Bound at this path, where a socket on which nobody listens any more gives way.

    Raises ConfigError where there is another file, and OSError (EADDRINUSE where somebody listens).
    """
    if path.is_socket():
        if not _is_listening(path):
            path.unlink(missing_ok=True)
    elif path.exists():
        raise ConfigError("uds", f"{path}, a file that is no socket", "give another path")
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(str(path))
        os.chmod(path, SOCKET_MODE)  # before anybody can connect
    except OSError:
        bound.close()
        raise
    return bound


def _is_listening(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as asking:
        asking.setblocking(False)  # one whose queue is full has a listener, too
        try:
            asking.connect(str(path))
        except ConnectionRefusedError:
            return False
        except OSError:
            return True
    return True
