"""vLLM's CPU build serving a tiny model over our store: equal answers whatever happens to it or to the store. Slow.

Needs vLLM; --long kills it fifty times.
"""

import importlib.util
import random
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

import pytest

from tests.support.vllm_served import DISK_BYTES, ServedVllm, make_model
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]
NUM_TALKS, NUM_TOKENS = 8, 200
NUM_SEEDS = 5
KILL_ROUNDS, LONG_KILL_ROUNDS, SEEDS_PER_KILL = 3, 50, 4


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two folders with weights of the same shape."""
    folder = tmp_path_factory.mktemp("models")
    return [make_model(folder / name, seed) for seed, name in enumerate(("one", "two"))]


@pytest.fixture(scope="module")
def kill_seeds(request):
    """For each kill, those of the prompts that are asked meanwhile."""
    num_rounds = LONG_KILL_ROUNDS if request.config.getoption("--long") else KILL_ROUNDS
    return [range(at, at + SEEDS_PER_KILL) for at in range(100, 100 + num_rounds * SEEDS_PER_KILL, SEEDS_PER_KILL)]


@pytest.fixture(scope="module")
def alone(models, kill_seeds):
    """What vLLM answers without the tier, by the prompts' seed."""
    server = ServedVllm(models[0], None)
    try:
        server.start()
        one_by_one = ids([server.ask(prompt) for prompt in prompts(0)])
        answers = {seed: ids(server.ask_all(prompts(seed))) for seed in chain(range(NUM_SEEDS), *kill_seeds)}
    finally:
        server.kill()
    assert answers[0] == one_by_one, "answers depend on what else is computed: nothing could be compared"
    return answers


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


def test_answers_are_equal_and_hits_return_after_kills_and_other_weights_find_none(
    serve, models, alone, kill_seeds, tmp_path
):
    model = Path(shutil.copytree(models[0], tmp_path / "model"))
    server = serve(model, tmp_path / "store")
    server.start()
    asked = prompts(0)
    computed = [server.ask(prompt) for prompt in asked]
    assert cached(computed) == [0] * NUM_TALKS and ids(computed) == alone[0]
    settle()
    server.kill()

    draw, file = random.Random(1), tmp_path / "store" / "blocks" / "data.mdb"
    for round_number, seeds in enumerate(kill_seeds):
        server.start()
        again = server.ask_all(asked)
        assert ids(again) == alone[0], f"round {round_number}"
        assert all(one >= NUM_TOKENS - 64 for one in cached(again)), f"round {round_number}: {again}"
        settle()
        changed = file.stat().st_mtime_ns
        with ThreadPoolExecutor(NUM_TALKS) as threads:  # new ones, in the middle of whose stores it is killed
            for prompt in chain.from_iterable(map(prompts, seeds)):
                threads.submit(server.ask, prompt)
            wait_until(lambda before=changed: file.stat().st_mtime_ns != before)
            time.sleep(draw.random())
            server.kill()

    server.start()
    assert ids([server.ask(prompt) for prompt in asked]) == alone[0], "one by one"
    for seed in chain.from_iterable(kill_seeds):
        assert ids(server.ask_all(prompts(seed))) == alone[seed], f"{seed}: asked when it was killed"
    server.kill()

    shutil.copy(models[1] / "model.safetensors", model / "model.safetensors")
    server.start()
    others = [server.ask(prompt) for prompt in asked[:3]]
    assert cached(others) == [0] * 3
    assert ids(others) != alone[0][:3]


def test_models_and_tenants_find_their_own_in_one_store(serve, models, tmp_path):
    one, two = (serve(model, tmp_path / "store") for model in models)
    one.start()
    asked = prompts(0)
    computed = one.ask_all(asked)
    salted = one.ask(asked[0], cache_salt="a tenant")
    assert salted == computed[0] == (salted[0], 0), "another salt hits nothing, and changes no answer"
    assert one.metric("vllm:kvstore_disk_capacity_bytes") == DISK_BYTES and one.metric("vllm:kvstore_degraded") == 0
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


def test_two_workers_share_a_store_and_one_worker_finds_nothing_in_it(serve, models, tmp_path):
    asked = prompts(0)
    server = serve(models[0], tmp_path / "store", num_ranks=2)
    server.start()
    computed = server.ask_all(asked)
    settle()
    restart(server)
    again = server.ask_all(asked)
    assert ids(again) == ids(computed) and all(cached(again))
    server.kill()
    single = serve(models[0], tmp_path / "store")
    single.start()
    assert cached([single.ask(prompt) for prompt in asked]) == [0] * NUM_TALKS


def test_flipped_bits_in_the_data_file_change_no_answer(serve, models, alone, tmp_path):
    server = serve(models[0], tmp_path / "store")
    server.start()
    asked = prompts(0)
    server.ask_all(asked)
    settle()
    server.kill()
    file = tmp_path / "store" / "blocks" / "data.mdb"
    data, draw = bytearray(file.read_bytes()), random.Random(0)
    for _ in range(20):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    file.write_bytes(data)
    server.start()
    assert ids(server.ask_all(asked)) == alone[0]
    server.ask_all(prompts(1))
    settle()
    restart(server)
    assert ids(server.ask_all(asked)) == alone[0]


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


def test_a_full_disk_and_a_read_only_one_change_no_answer(serve, models, alone, tmp_path, small_disk):
    server = serve(models[0], tmp_path / "disk" / "store", within=small_disk)
    server.start()
    for seed in range(NUM_SEEDS):  # 2 MiB each
        assert ids(server.ask_all(prompts(seed))) == alone[seed]
    settle()
    restart(server)
    again = {seed: [] for seed in range(NUM_SEEDS)}
    for i in range(NUM_TALKS):  # some of each, before these evict what is there
        for seed, answers in again.items():
            answers.append(server.ask(prompts(seed)[i]))
    assert {seed: ids(answers) for seed, answers in again.items()} == {seed: alone[seed] for seed in again}
    assert any(num_tokens for answers in again.values() for num_tokens in cached(answers))
    other = tmp_path / "disk" / "another program's"
    filled = subprocess.run([*small_disk, "dd", "if=/dev/zero", f"of={other}"], capture_output=True, text=True)
    assert "No space left" in filled.stderr
    for seed in range(NUM_SEEDS):
        assert ids(server.ask_all(prompts(seed))) == alone[seed], f"{seed}, after another program has filled the disk"
    server.kill()
    subprocess.run([*small_disk, "mount", "-o", "remount,ro", str(tmp_path / "disk")], check=True)
    server.launch()
    assert server.process.wait() != 0
    assert "is not writable; change its permissions or give another" in server.log.read_text()
