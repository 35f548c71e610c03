"""`kvstore plan`: replays traffic at several sizes of the tiers, and says which are worth it.

Knows the flags and the order of the work: it finds the traffic, kvstore.planning.replay answers, `tables`
shows it.
"""

import importlib.util
import itertools
import json
import math
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from kvstore.config import COUNT, FILE, SIZE, ValueForm, matching, one_of, parse_size, several
from kvstore.engine.progress import tell_in_lines
from kvstore.errors import ConfigError, StoreError
from kvstore.planning import sizing
from kvstore.planning.replay_config import ReplayConfig, ReplayResult, ServiceModel
from kvstore.planning.sizing import KV_BYTES_PER_TOKEN, last_requests
from kvstore.planning.trace_formats import FORMATS, read_session_lines, read_trace
from kvstore.planning.traces import Trace
from kvstore.policy.policies import POLICIES
from kvstore.service.command.progress import progress
from kvstore.service.command.store import carry_out
from kvstore.service.command.terminal import tolerate_any_text
from kvstore.service.settings.config_file import Told
from kvstore.service.settings.options import JSON, STORE, Command, Option, UsageError, default_store
from kvstore.store.history import history_files, joined

HISTORY_BLOCK_SIZES = (128, 64, 32)  # the largest of which a prompt holds MEAN_BLOCKS, else STORE_BLOCK_SIZE
MEAN_BLOCKS = 32  # on average, so that what is lost by rounding stays at a few per cent
STORE_BLOCK_SIZE = 16  # of the engine, unless it is told otherwise
LEAST_BLOCKS = 64  # on disk; with fewer, file sizes say nothing, as an empty file has pages, too
NO_HISTORY = (
    "the store at {path} has no history yet; it records one while an engine serves with a disk tier there. "
    "Give --trace FILE --format FORMAT to plan from a file"
)
MAX_POINTS = 100
PICTURES = (".png", ".svg")


@dataclass(frozen=True, slots=True)
class Source:
    """kv_bytes_per_token: None when it is not known. disk_share, hbm_share: bytes on disk and in HBM of one byte of KV
    in memory. hbm_bytes: of the engine that owns the store. measured: names of those parts of `service` that the store
    has measured. computed_tokens: of prompts, by that engine; 0: what it knows of computing was measured by an earlier
    one. checkpoints: `state_blocks` and `window_blocks` of a replay of this trace.
    """

    trace: Trace
    name: str
    kv_bytes_per_token: float | None = None
    disk_share: float = 1.0
    hbm_bytes: int | None = None
    service: ServiceModel = field(default_factory=ServiceModel)
    measured: tuple[str, ...] = ()
    computed_tokens: int = 0
    hbm_share: float = 1.0
    checkpoints: tuple[int, int] = (0, 0)


def from_file(path: Path, trace_format: str, block_size: int | None, num_requests: int | None) -> Source:
    trace = read_trace(path, trace_format, block_size)
    return Source(trace if num_requests is None else last_requests(trace, num_requests), path.name)


def from_store(path: Path, stats: Mapping[str, Any], block_size: int | None, num_requests: int | None) -> Source:
    """stats: what `kvstore stats` says of this store. Raises StoreError when it has no history."""
    trace = _history(path, block_size, num_requests)
    service, measured = _measured(stats)
    kv_bytes, disk_share = _kv_bytes_of_model(stats)
    hbm = stats.get("hbm") or {}
    hbm_bytes = hbm.get("blocks", 0) * hbm.get("block_bytes", 0) or None
    tokens = stats.get("tokens") or {}
    num_computed = tokens.get("prompt_tokens", 0) - tokens.get("cached_tokens", 0)
    return Source(
        trace, f"the history of {path}", kv_bytes, disk_share, hbm_bytes, service, measured, num_computed,
        hbm["block_bytes"] / (stats.get("cpu") or hbm)["block_bytes"] if hbm_bytes else 1.0,
        _checkpoints(stats, trace.block_size),
    )  # fmt: skip


# -- the history -----------------------------------------------------------------------------------------------------
def _history(path: Path, block_size: int | None, num_requests: int | None) -> Trace:
    lines = list(joined(_lines(path)))
    if num_requests is not None:
        lines = lines[-num_requests:]
    if not lines:
        raise StoreError(NO_HISTORY.format(path=path))
    trace = read_session_lines(lines, "history", block_size or STORE_BLOCK_SIZE)
    fitting = _fitting_block_size(trace)
    return trace if block_size or fitting == STORE_BLOCK_SIZE else read_session_lines(lines, "history", fitting)


def _lines(path: Path) -> list[str]:
    found = []
    for file in history_files(path):
        try:
            found += file.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            continue  # rotated meanwhile
        except OSError as error:
            raise StoreError(f"the history {file} cannot be read: {error.strerror or error}") from None
    return found


def _fitting_block_size(trace: Trace) -> int:
    """A replay of larger blocks is faster, and blurs what short prompts share."""
    mean_tokens = sum(request.num_tokens for request in trace.requests) / len(trace.requests)
    return next((size for size in HISTORY_BLOCK_SIZES if size * MEAN_BLOCKS <= mean_tokens), STORE_BLOCK_SIZE)


# -- what the store says about itself --------------------------------------------------------------------------------
def _measured(stats: Mapping[str, Any]) -> tuple[ServiceModel, tuple[str, ...]]:
    store, disk = stats.get("store") or {}, stats.get("disk") or {}
    found = {
        "prefill_tokens_per_s": store.get("prefill_tokens_per_s"),
        "load_bytes_per_s": store.get("load_bytes_per_s"),
        "read_bytes_per_s": store.get("read_bytes_per_s") or disk.get("read_bytes_per_s"),
        "write_bytes_per_s": disk.get("write_bytes_per_s"),
    }
    known: dict[str, Any] = {name: rate for name, rate in found.items() if rate and 0 < rate < math.inf}
    return replace(ServiceModel(), **known), tuple(known)


def _kv_bytes_of_model(stats: Mapping[str, Any]) -> tuple[float | None, float]:
    """Bytes of a token's KV, from the engine or from the model that has most blocks on disk; and `disk_share`."""
    hbm, disk = stats.get("hbm") or {}, stats.get("disk") or {}
    if block_bytes := (stats.get("cpu") or hbm).get("block_bytes"):  # in HBM layers with a window have more
        num_blocks = disk.get("blocks", 0)
        share = _share(disk.get("bytes", 0), num_blocks if num_blocks >= LEAST_BLOCKS else 0, block_bytes)
        return block_bytes / hbm.get("block_size", STORE_BLOCK_SIZE), share
    known = [model for model in (disk.get("models") or {}).values() if model.get("block_size")]
    if not known:
        return None, 1.0
    model = max(known, key=lambda model: model["blocks"])
    share = _share(model["bytes"], model["blocks"], model["block_bytes"])
    return model["block_bytes"] / model["block_size"], share


def _checkpoints(stats: Mapping[str, Any], block_size: int) -> tuple[int, int]:
    """What the engine says of its model's checkpoints, in blocks of another size."""
    store = stats.get("store") or {}
    num_blocks, num_windows = store.get("state_blocks", 0), store.get("window_blocks", 0)
    own_size = (stats.get("hbm") or {}).get("block_size", STORE_BLOCK_SIZE)
    if num_windows:  # one behind each block, so it grows with that
        return num_blocks, math.ceil(num_windows * own_size / block_size)
    return math.ceil(num_blocks * own_size / block_size), 0


def _share(stored_bytes: int, num_blocks: int, block_bytes: int) -> float:
    return stored_bytes / (num_blocks * block_bytes) if stored_bytes and num_blocks else 1.0


def needed_kv_bytes(source: Source) -> float:
    """What the source knows. Raises ConfigError with what to give where it does not."""
    if source.kv_bytes_per_token is not None:
        return source.kv_bytes_per_token
    forms = f"give --kv-bytes-per-token, a size or one of {', '.join(KV_BYTES_PER_TOKEN)}"
    raise ConfigError(f"{source.name} does not say how large the KV of a token is; {forms}")


# -- flags -----------------------------------------------------------------------------------------------------------
def _kv_bytes(text: str) -> int:
    with suppress(ConfigError):
        return sizing.KV_BYTES_PER_TOKEN.get(text.lower()) or parse_size(text)
    return 0


def _picture(text: str) -> Path:
    path: Path = FILE.parse(text)
    if path.suffix.lower() not in PICTURES:
        raise ValueError
    if not path.parent.is_dir():
        raise ConfigError("", f"{text!r}, but there is no directory {path.parent}", "give one that is there")
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("", f"{text!r}, which needs matplotlib", "pip install matplotlib")
    return path


MODELS = ", ".join(sizing.KV_BYTES_PER_TOKEN)


KV_BYTES = ValueForm(parse=_kv_bytes, accepts=f"a size such as 128KiB, or one of {MODELS}", low=1)


RATE = ValueForm(
    parse=matching(r"[0-9]{1,12}(\.[0-9]{1,9})?", float), accepts="tokens a second, a number above 0", low=1e-9
)


BANDWIDTH = ValueForm(parse=lambda text: float(parse_size(text)), accepts="bytes a second, such as 3GB", low=1)


PICTURE = ValueForm(parse=_picture, accepts=f"a file that ends in {' or '.join(PICTURES)}")


SIZES = several(SIZE, "SIZES")


SERVICE_OPTIONS = {  # the names of a service model's parts
    "prefill_tokens_per_s": Option("--prefill-rate", RATE, None, "prompt tokens that are computed in a second"),
    "decode_tokens_per_s": Option("--decode-rate", RATE, None, "tokens of one answer in a second"),
    "max_batch": Option("--batch", COUNT, None, "requests running at once"),
    "load_bytes_per_s": Option("--load-bandwidth", BANDWIDTH, None, "from CPU to HBM in a second, such as 25GB"),
    "read_bytes_per_s": Option("--read-bandwidth", BANDWIDTH, None, "from disk in a second"),
    "write_bytes_per_s": Option("--write-bandwidth", BANDWIDTH, None, "to disk in a second"),
}


PLAN_OPTIONS = (
    replace(STORE, help="replay what this store recorded while it served"),
    Option("--trace", FILE, None, "replay this file instead"),
    Option("--format", one_of(*FORMATS), None, f"of the trace: {', '.join(FORMATS)}"),
    Option("--requests", COUNT, None, "only the last so many requests"),
    Option("--hbm", SIZES, None, "one or several sizes, such as 16GiB,32GiB", mirrored=False),
    Option("--cpu", SIZES, None, "one or several sizes; 0 is no such tier", mirrored=False),
    Option("--disk", SIZES, None, "one or several sizes; 0 is no such tier", mirrored=False),
    Option(
        "--kv-bytes-per-token", KV_BYTES, None, f"a size, or a model: {MODELS}",
        "the store's own",
    ),
    Option("--block-size", COUNT, None, "tokens per block of the replay", "what fits", mirrored=False),
    Option(
        "--policy", one_of(*POLICIES), "auto", f"what is evicted first: {', '.join(POLICIES)}",
        aliases=("--eviction",),
    ),
    *SERVICE_OPTIONS.values(),
    Option("--plot", PICTURE, None, "draw hit rate and TTFT into a file, .png or .svg"),
    JSON,
)  # fmt: skip


EXAMPLES = """Without sizes, HBM is what serves a full batch, and disk and CPU (an eighth of it) grow in powers of two
until the disk holds everything. Of several sizes every combination is replayed. What the service can do is taken from
the server that has the store open, as far as it has measured it, else assumed; the answer says which. Sizes and
--block-size are never taken from the environment, where they describe an engine.

examples:
  kvstore plan                                    what the default store would have gained from other sizes
  kvstore plan --store ~/store --cpu 4GiB,16GiB --disk 64GiB,256GiB
  kvstore plan --trace trace.jsonl --format mooncake --kv-bytes-per-token llama-3.1-8b --plot plan.png
  kvstore plan --requests 20000 --json | python -m json.tool"""


COMMAND = Command("plan", {"flags": PLAN_OPTIONS}, EXAMPLES)


# -- the question ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Question:
    """What to replay, at which sizes, and the assumptions made, a sentence each."""

    source: Source
    demand: sizing.Extent
    geometry: sizing.Geometry
    service: ServiceModel
    policy: str
    sizes: list[sizing.Sizes]
    assumed: list[str]

    def config(self, sizes: sizing.Sizes) -> ReplayConfig:
        blocks = self.geometry.blocks(sizes)
        state_blocks, window_blocks = self.source.checkpoints
        return ReplayConfig(
            *blocks, self.geometry.block_bytes, policy=self.policy, service=self.service, state_blocks=state_blocks,
            window_blocks=window_blocks,
        )  # fmt: skip

    @property
    def hbm_bytes(self) -> int:
        return max(one.hbm for one in self.sizes)


def _question(values: Mapping[str, Any]) -> Question:
    """Read the trace and decide what to replay. Raises ConfigError and StoreError."""
    block_size, num_requests = values["block_size"], values["requests"]
    stats = None if values["trace"] is not None else carry_out(values, "stats", {}, "reading the store")
    with progress("reading the traffic", values["json"]):
        if stats is None:
            source = from_file(values["trace"], values["format"], block_size, num_requests)
        else:
            source = from_store(values["store"], stats, block_size, num_requests)
        demand = sizing.extent(source.trace)
    if values["kv_bytes_per_token"] is not None:
        source = replace(source, kv_bytes_per_token=values["kv_bytes_per_token"])
    given = {name: values[option.key] for name, option in SERVICE_OPTIONS.items() if values[option.key] is not None}
    service = replace(source.service, **given)
    block_bytes = math.ceil(needed_kv_bytes(source) * source.trace.block_size)
    geometry = sizing.Geometry(
        block_bytes, max(round(block_bytes * source.disk_share), 1), math.ceil(block_bytes * source.hbm_share)
    )
    sizes, assumed = _chosen_sizes(values, source, demand, geometry, service)
    for one in sizes:
        geometry.blocks(one)  # raises ConfigError for those that cannot be
    measured = tuple(name for name in source.measured if name not in given)
    return Question(replace(source, measured=measured), demand, geometry, service, values["policy"], sizes, assumed)


def _chosen_sizes(
    values: Mapping[str, Any], source: Source, demand: sizing.Extent, geometry: sizing.Geometry, service: ServiceModel
) -> tuple[list[sizing.Sizes], list[str]]:
    """The sizes to replay, and what was assumed where none were given."""
    assumed = []
    if values["hbm"] is not None:
        hbms = values["hbm"]
    elif source.hbm_bytes is not None:
        hbms, assumed = [source.hbm_bytes], ["HBM is that of the engine which owns the store"]
    else:
        hbms = [sizing.batch_bytes(demand, source.trace.block_size, geometry.hbm_block_bytes, service.max_batch)]
        assumed = ["HBM is what serves a full batch"]
    if values["cpu"] is None and values["disk"] is None:
        working_set_bytes = demand.working_set_blocks * geometry.disk_block_bytes
        assumed.append(f"disk up to the working set in powers of two, CPU 1/{sizing.CPU_SHARE} of it")
        return [one for hbm in hbms for one in sizing.sweep(working_set_bytes, hbm)], assumed
    for tier in ("cpu", "disk"):
        if values[tier] is None:
            assumed.append(f"no {'CPU' if tier == 'cpu' else tier} tier, as --{tier} is not given")
    grid = itertools.product(hbms, values["cpu"] or [0], values["disk"] or [0])
    return [sizing.Sizes(*one) for one in grid], assumed


# -- the answer ------------------------------------------------------------------------------------------------------
def _replay_all(question: Question, answer: dict[str, Any], on_progress: Callable[[float | None], None]) -> None:
    """Add the points to the answer. no_cache: no block is used twice; ideal: there is room for all blocks."""
    from kvstore.planning.replay import replay

    num_replays, num_requests = len(question.sizes) + 2, question.demand.num_requests
    numbers = itertools.count()

    def row(sizes: sizing.Sizes, config: ReplayConfig, reuses: bool = True) -> dict[str, Any]:
        number = next(numbers)
        trace = question.source.trace if reuses else sizing.without_reuse(question.source.trace)
        result = replay(trace, config, lambda done: on_progress((number + done / num_requests) / num_replays))
        return _row(sizes, result, question)

    hbm_alone = sizing.Sizes(question.hbm_bytes, 0, 0)
    simple = replace(question.config(hbm_alone), policy="lru", look_ahead=False)
    num_blocks = question.demand.working_set_blocks + question.demand.largest_blocks
    unlimited = replace(simple, cpu_blocks=num_blocks + 2 * num_requests * simple.checkpoint_blocks)
    answer["no_cache"] = row(hbm_alone, simple, reuses=False)
    answer["ideal"] = row(hbm_alone, unlimited)
    for sizes in question.sizes:
        answer["points"].append(row(sizes, question.config(sizes)))


def _row(sizes: sizing.Sizes, result: ReplayResult, question: Question) -> dict[str, Any]:
    num_tokens = max(result.num_prompt_tokens, 1)
    num_dropped = result.num_dropped_saves + result.num_dropped_writes
    num_saved = result.bytes_moved["save"] // question.geometry.block_bytes
    return {
        "hbm_bytes": sizes.hbm,
        "cpu_bytes": sizes.cpu,
        "disk_bytes": sizes.disk,
        "total_bytes": sizes.total,
        "token_hit_rate": result.token_hit_rate,
        "hit_rate_by_tier": {tier: tokens / num_tokens for tier, tokens in result.hits_at_arrival.items()},
        "ttft_mean_s": result.ttft_mean_s,
        "ttft_p90_s": result.ttft_p90_s,
        "load": sizing.load_of(question.demand, result.token_hit_rate, question.service),
        "dropped_share": num_dropped / max(num_saved + result.num_dropped_saves, 1),  # of what should have been saved
        "num_refused": result.num_refused,
    }


def _plan(question: Question, answer: dict[str, Any]) -> dict[str, Any]:
    """All of it, as --json prints it."""
    points = answer["points"]
    demand, trace, geometry = question.demand, question.source.trace, question.geometry
    bend = sizing.knee([sizing.Point(row["total_bytes"], row["token_hit_rate"]) for row in points])
    return {
        "trace": {
            "name": question.source.name,
            "requests": demand.num_requests,
            "conversations": demand.num_conversations,
            "hours": demand.duration_s / 3600,
            "prompt_tokens": demand.num_prompt_tokens,
            "output_tokens": demand.num_output_tokens,
            "block_size": trace.block_size,
            "working_set_blocks": demand.working_set_blocks,
            "working_set_bytes": demand.working_set_blocks * geometry.block_bytes,
            "notes": list(trace.notes),
        },
        "assumptions": {
            "policy": question.policy,
            "kv_bytes_per_token": geometry.block_bytes / trace.block_size,
            "disk_bytes_per_token": geometry.disk_block_bytes / trace.block_size,
            "checkpoint_bytes": geometry.block_bytes * question.config(question.sizes[0]).checkpoint_blocks,
            "service": asdict(question.service),
            "measured": list(question.source.measured),
            "computed_tokens": question.source.computed_tokens,
            "sizes": question.assumed,
        },
        **answer,
        "knee": None if bend is None else best_row(points, bend.capacity),
        "is_complete": len(points) == len(question.sizes),
    }


def best_row(rows: list[dict[str, Any]], capacity: int) -> dict[str, Any]:
    """The row with the best hit rate within this total size; of equal ones the cheapest."""
    affordable = [row for row in rows if row["total_bytes"] <= capacity]
    return max(affordable, key=lambda row: (row["token_hit_rate"], -row["total_bytes"]))


# -- the command -----------------------------------------------------------------------------------------------------
def run(given: Told) -> int:
    """Run it and return 0. Raises UsageError and ConfigError for its flags, KVStoreError for what then fails.

    KeyboardInterrupt comes out after what was done so far has been shown.
    """
    values = given.values
    _check({name for name, setting in given.settings.items() if setting.origin.startswith("flag ")}, values)
    tolerate_any_text()
    tell_in_lines()
    question = _question(values)
    answer: dict[str, Any] = {"no_cache": None, "ideal": None, "points": []}
    try:
        with progress("replaying", values["json"]) as on_progress:
            _replay_all(question, answer, on_progress)
    except KeyboardInterrupt:
        if answer["points"]:
            _show(_plan(question, answer), values)
        raise
    _show(_plan(question, answer), values)
    return 0


def _check(given: Set[str], values: dict[str, Any]) -> None:
    """Check combinations of flags. given: those on the command line. A trace wins over a store from the environment."""
    if values["trace"] is None:
        if "format" in given:
            raise UsageError("--format is that of a file; give --trace FILE too")
        values["store"] = values["store"] or STORE.reads.read(STORE.flag, default_store())
    elif "store" in given:
        raise UsageError("--trace and --store are two traffics; give one of them")
    elif values["format"] is None:
        raise UsageError(f"--trace needs --format, one of {', '.join(FORMATS)}")
    elif values["kv_bytes_per_token"] is None:
        forms = f"a size or one of {MODELS}"
        raise UsageError(f"--trace needs --kv-bytes-per-token, {forms}: a trace does not say how large KV is")
    num_points = math.prod(len(values[tier] or [0]) for tier in ("hbm", "cpu", "disk"))
    if num_points > MAX_POINTS:
        raise UsageError(f"{num_points} combinations of sizes take too long; give {MAX_POINTS} at most")


def _show(plan: dict[str, Any], values: Mapping[str, Any]) -> None:
    if values["json"]:
        print(json.dumps(plan))
    else:
        from kvstore.service.command.plan.tables import show_plan
        from kvstore.service.command.store_tables import console

        show_plan(plan, console())
    if values["plot"] is not None:
        from kvstore.service.command.plan.tables import draw

        draw(plan, values["plot"])
