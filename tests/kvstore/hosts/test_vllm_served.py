"""vLLM's CPU build serving a tiny model over our store: equal answers whatever happens to it or to the store. Slow.

Needs vLLM; --long kills it fifty times.
"""

import importlib.util
import random
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.vllm_served import ServedVllm, make_model

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]
NUM_TALKS, NUM_TOKENS = 8, 200


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two folders with weights of the same shape."""
    folder = tmp_path_factory.mktemp("models")
    return [make_model(folder / name, seed) for seed, name in enumerate(("one", "two"))]


@pytest.fixture
def serve():
    """Makes servers, which are killed at the end."""
    made = []

    def make(*args, **options):
        made.append(ServedVllm(*args, **options))
        return made[-1]

    yield make
    for one in made:
        one.kill()


def prompts(seed: int) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(3, 512) for _ in range(NUM_TOKENS + 10 * i)] for i in range(NUM_TALKS)]


def ids(answers):
    return [tokens for tokens, _ in answers]


def cached(answers):
    return [num_tokens for _, num_tokens in answers]


def settle() -> None:
    """Until what was computed is on disk: the tier writes within a second."""
    time.sleep(2)


def restart(*servers):
    for server in servers:
        server.kill()
    for server in servers:
        server.launch()
    for server in servers:
        server.wait()


def test_answers_are_equal_and_hits_return_after_kills_and_other_weights_find_none(serve, models, request, tmp_path):
    model = Path(shutil.copytree(models[0], tmp_path / "model"))
    server = serve(model, tmp_path / "store")
    server.start()
    asked = prompts(0)
    computed = [server.ask(prompt) for prompt in asked]
    assert cached(computed) == [0] * NUM_TALKS
    settle()
    server.kill()

    draw = random.Random(1)
    for round_number in range(50 if request.config.getoption("--long") else 3):
        server.start()
        again = server.ask_all(asked)
        assert ids(again) == ids(computed), f"round {round_number}"
        assert all(one >= NUM_TOKENS - 64 for one in cached(again)), f"round {round_number}: {again}"
        with ThreadPoolExecutor(NUM_TALKS) as threads:  # new ones, in the middle of which it is killed
            for prompt in prompts(100 + round_number):
                threads.submit(server.ask, prompt)
            time.sleep(draw.random())
            server.kill()

    server.start()
    assert ids([server.ask(prompt) for prompt in asked]) == ids(computed), "one by one"
    server.kill()

    shutil.copy(models[1] / "model.safetensors", model / "model.safetensors")
    server.start()
    others = [server.ask(prompt) for prompt in asked[:3]]
    assert cached(others) == [0] * 3
    assert ids(others) != ids(computed[:3])


def test_models_and_tenants_find_their_own_in_one_store(serve, models, tmp_path):
    one, two = (serve(model, tmp_path / "store") for model in models)
    one.start()
    asked = prompts(0)
    computed = one.ask_all(asked)
    salted = one.ask(asked[0], cache_salt="a tenant")
    assert salted == computed[0] == (salted[0], 0), "another salt hits nothing, and changes no answer"
    settle()
    one.kill()
    two.start()
    others = two.ask_all(asked)
    assert cached(others) == [0] * NUM_TALKS and ids(others) != ids(computed)
    settle()
    two.kill()
    one.start()
    again = one.ask_all(asked)
    assert ids(again) == ids(computed) and all(cached(again))
    tenants = [one.ask(asked[0], cache_salt=salt) for salt in ("a tenant", "another")]
    assert ids(tenants) == [salted[0]] * 2 and tenants[0][1] > 0 == tenants[1][1]


def test_two_are_served_at_once_from_two_stores_and_a_third_on_one_of_them_is_refused(serve, models, tmp_path):
    servers = [serve(model, tmp_path / f"store of {model.name}") for model in models]
    restart(*servers)
    asked = prompts(0)
    with ThreadPoolExecutor(2) as threads:
        computed = list(threads.map(lambda server: server.ask_all(asked), servers))
    settle()
    third = serve(models[1], servers[0].store)
    third.launch()
    assert third.process.wait() != 0
    assert 'give each vLLM a "path" of its own' in third.log.read_text()
    restart(*servers)
    with ThreadPoolExecutor(2) as threads:
        again = list(threads.map(lambda server: server.ask_all(asked), servers))
    assert [ids(one) for one in again] == [ids(one) for one in computed]
    assert all(all(cached(one)) for one in again)


def test_flipped_bits_in_the_data_file_change_no_answer(serve, models, tmp_path):
    server = serve(models[0], tmp_path / "store")
    server.start()
    asked = prompts(0)
    computed = server.ask_all(asked)
    settle()
    server.kill()
    file = tmp_path / "store" / "blocks" / "data.mdb"
    data, draw = bytearray(file.read_bytes()), random.Random(0)
    for _ in range(20):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)
    server.start()
    assert ids(server.ask_all(asked)) == ids(computed)
    server.ask_all(prompts(1))
    settle()
    restart(server)
    assert ids(server.ask_all(asked)) == ids(computed)


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 6 MiB where the store will be, and how to start and run something where it is seen."""
    (tmp_path / "disk").mkdir()
    script = 'mount -t tmpfs -o size=6m none "$0" && echo mounted && cat'
    command = ["unshare", "-Urm", "sh", "-c", script, str(tmp_path / "disk")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        if holder.stdout.readline() != "mounted\n":
            pytest.skip("no tmpfs can be mounted here")
        yield ["nsenter", "-t", str(holder.pid), "-U", "-m", "--preserve-credentials"]
        holder.stdin.close()


def test_a_full_disk_and_a_read_only_one_change_no_answer(serve, models, tmp_path, small_disk):
    server = serve(models[0], tmp_path / "disk" / "store", within=small_disk)
    server.start()
    asked = prompts(0)
    computed = [server.ask(prompt) for prompt in asked]
    for seed in range(1, 5):  # 2 MiB each
        assert len(ids(server.ask_all(prompts(seed)))) == NUM_TALKS
    settle()
    restart(server)
    # Of eight at once on so small a disk some are dropped, and these may be the last ones.
    again = [server.ask(prompt) for seed in (2, 3, 1, 4, 0) for prompt in prompts(seed)]
    assert ids(again[-NUM_TALKS:]) == ids(computed) and any(cached(again))
    server.kill()
    subprocess.run([*small_disk, "mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
    server.launch()
    assert server.process.wait() != 0
    assert "is not writable; change its permissions or give another" in server.log.read_text()
