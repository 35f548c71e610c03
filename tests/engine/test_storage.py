"""What can be wrong with a store or its sizes is said before weights are read."""

import pytest

from kvstore.config import CacheTiers
from kvstore.disk.directory import StoreDirectory
from kvstore.engine.client.local import check_room
from kvstore.engine.config import EngineConfig
from kvstore.errors import ConfigError, ModelError, StoreError, StoreLockedError
from tests.support.engines import LLAMA_BLOCK_BYTES, open_engine, save_model


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Its configuration is sound; reading its weights fails."""
    folder = tmp_path_factory.mktemp("unreadable")
    save_model(folder)
    (folder / "model.safetensors").write_bytes(b"no weights")
    return str(folder)


def test_the_weights_come_last(model, tmp_path):
    store = tmp_path / "store"
    with StoreDirectory.open(store), pytest.raises(StoreLockedError, match="in use by this process"):
        open_engine(model, store)
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StoreError, match=r"is a file"):
        open_engine(model, tmp_path / "file")
    with pytest.raises(ConfigError, match=r"disk is 1000 B; give at least 1.0 MiB, or 0"):
        open_engine(model, store, disk=1000)
    with pytest.raises(ConfigError, match=r"cpu is .* one block of this model needs"):
        open_engine(model, store, cpu=LLAMA_BLOCK_BYTES)
    with pytest.raises(ModelError):
        open_engine(model, store)
    StoreDirectory.open(store).close()  # nobody holds it


def test_a_block_as_the_configuration_tells_it(model):
    import transformers

    network = transformers.AutoConfig.from_pretrained(model)
    for tier, least in (("hbm", 1), ("cpu", 2), ("disk", 4)):
        sizes = {"hbm": "1MiB", "path": "store", tier: least * LLAMA_BLOCK_BYTES}
        check_room(EngineConfig(model, CacheTiers(**sizes), dtype="float32"), network)
        with pytest.raises(ConfigError, match=f"{tier} is"):
            check_room(EngineConfig(model, CacheTiers(**sizes | {tier: sizes[tier] - 1}), dtype="float32"), network)
