"""Two ranks on two CUDA devices: the same tokens as one process says, over the same store."""

import os
import signal

import pytest
import torch

from kvstore import CacheTiers, Engine
from tests.support.engines import greedy
from tests.support.ranks import PROMPTS, SIZES, check_reads, check_says, end_while_it_answers, is_gone, rank_of

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def two_devices() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")


def opened(model: str, path, **options) -> Engine:
    tiers = CacheTiers("2MiB", "2MiB", "32MiB", path)
    return Engine(model, tiers, device="cuda", dtype="float32", load="always", enforce_eager=True, **options)


@pytest.mark.parametrize("size", SIZES)
def test_two_devices_say_what_one_does(size, model, tmp_path):
    with opened(model, tmp_path / "one") as engine:
        expected = [out.token_ids for out in engine.generate(PROMPTS, greedy(12))]
    with opened(model, tmp_path / "two", **SIZES[size]) as engine:
        check_says(engine, expected)
    with opened(model, tmp_path / "two") as engine:
        check_reads(engine, expected)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_ends_is_waited_for_no_longer(size, sign, model, tmp_path):
    with opened(model, tmp_path / "store", **SIZES[size]) as engine:
        rank = rank_of(os.getpid())
        end_while_it_answers(engine, rank, sign)
    assert is_gone(rank)
