"""What is derived from a fleet's secret: roots of chains that replicas agree on, and names that nobody else can guess.

Whoever can compute a block's id could find out that somebody said the same. The name in a shared store needs the
secret.
"""

import hashlib
import hmac
import os
from collections.abc import Mapping
from pathlib import Path

from kvstore.blocks.ids import BlockId
from kvstore.errors import ConfigError
from kvstore.remote.address import read_secret

SECRET_VARIABLE = "KVSTORE_FLEET_SECRET"
LEAST_SECRET_CHARS = 32
FORMAT = "kvstore/1"  # the format of names and values
PREFILL_KEY = "prefill"  # the purpose of the key with which servers sign in to one that prefills
HOW = (
    f"write one line of {LEAST_SECRET_CHARS} random characters or more, such as `openssl rand -hex 32` prints, into a "
    f"file, the same on each replica, and give --fleet-secret-file, or set ${SECRET_VARIABLE}"
)


class FleetSecret:
    """The secret that only the replicas of a service share. root: the key for their block ids."""

    def __init__(self, text: str) -> None:
        self._key = hashlib.sha256(text.encode()).digest()
        self.root = self.derived("lineage roots")

    def derived(self, purpose: str) -> bytes:
        """A 32-byte key for one purpose."""
        return hmac.new(self._key, purpose.encode(), hashlib.sha256).digest()


def fleet_secret(file: str | Path | None, environment: Mapping[str, str] = os.environ) -> FleetSecret:
    """The secret from its file, else from $KVSTORE_FLEET_SECRET. Raises ConfigError if there is none, or a short
    one.
    """
    text = environment.get(SECRET_VARIABLE, "").strip()
    if file is not None:
        text = read_secret(Path(file), "fleet secret file")
    if not text:
        raise ConfigError(f"there is no secret of the fleet; {HOW}")
    if len(text) < LEAST_SECRET_CHARS:
        raise ConfigError(f"the secret of the fleet has {len(text)} characters; {HOW}")
    return FleetSecret(text)


class BlockNames:
    """The names of one model's blocks in a shared store. fingerprint: that of the model and layout."""

    def __init__(self, secret: FleetSecret, fingerprint: bytes) -> None:
        self.prefix = f"{FORMAT}/{fingerprint.hex()[:16]}/"
        self._key = secret.derived("block names")

    def of(self, block_id: BlockId) -> str:
        return self.prefix + hmac.digest(self._key, block_id, "sha256").hex()[:40]
