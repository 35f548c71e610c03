"""What our classes take for granted of vLLM, held against its sources as text: of the installed one, and of every
folder that --vllm-sources names, where a wheel is unpacked. Nothing of vLLM is imported.
"""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvstore import hosts

HOSTS = Path(hosts.__file__).parent
OURS = {  # file and class: what it stands in for
    ("vllm.py", "KVStoreConnector"): (
        "distributed/kv_transfer/kv_connector/v1/offloading_connector.py", "OffloadingConnector"
    ),
    ("vllm.py", "KVStoreTier"): ("v1/kv_offload/tiering/base.py", "SecondaryTierManager"),
    ("vllm_policy.py", "KVStorePolicy"): ("v1/kv_offload/cpu/policies/base.py", "CachePolicy"),
    ("vllm_cpu.py", "MemcpyWorker"): ("v1/kv_offload/base.py", "OffloadingWorker"),
    ("vllm_cpu.py", "CPUTieringSpec"): ("v1/kv_offload/tiering/spec.py", "TieringOffloadingSpec"),
}  # fmt: skip
FIELDS = {  # that we read or write by name or place, in this order
    ("v1/kv_offload/tiering/base.py", "TransferJob"): ("job_id", "keys", "chunk_ids", "is_promotion", "req_context"),
    ("v1/kv_offload/tiering/base.py", "JobResult"): (
        "job_id", "success", "successful_keys", "transfer_time", "transfer_bytes"
    ),
    ("v1/kv_offload/base.py", "ReqContext"): (
        "req_id", "kv_transfer_params", "kv_hints", "_offload_key_positions"
    ),
    ("v1/kv_offload/base.py", "ScheduleEndContext"): ("new_req_ids", "preempted_req_ids"),
    ("v1/kv_offload/base.py", "TransferResult"): ("job_id", "success", "transfer_size", "transfer_time"),
    ("v1/kv_offload/base.py", "CanonicalKVCacheTensor"): ("tensor", "page_size_bytes"),
    ("v1/kv_offload/base.py", "CanonicalKVCacheRef"): ("tensor_idx", "page_size_bytes"),
    ("v1/kv_offload/base.py", "CanonicalKVCaches"): ("tensors", "group_data_refs"),
    ("v1/kv_offload/config.py", "OffloadingGroupConfig"): ("tokens_per_block", "group_id"),
    ("v1/kv_offload/config.py", "OffloadingModelConfig"): ("name", "dtype"),
    ("config/model.py", "ModelConfig"): ("model", "dtype", "hf_config", "revision", "max_model_len", "quantization"),
    ("config/load.py", "LoadConfig"): ("download_dir",),
    ("config/device.py", "DeviceConfig"): ("device_type",),
    ("config/cache.py", "CacheConfig"): ("prefix_caching_hash_algo",),
    ("config/kv_transfer.py", "KVTransferConfig"): ("kv_connector_extra_config", "kv_load_failure_policy"),
    ("v1/kv_offload/config.py", "OffloadingParallelConfig"): ("rank", "world_size", "tp_size", "pp_size"),
}  # fmt: skip


def installed() -> list[str]:
    found = importlib.util.find_spec("vllm")
    return [] if found is None or found.origin is None else [str(Path(found.origin).parent.parent)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    folders = [*installed(), *metafunc.config.getoption("--vllm-sources")]
    none = pytest.param(None, marks=pytest.mark.skip(reason="needs vLLM, or --vllm-sources"))
    metafunc.parametrize("vllm", [Path(one) / "vllm" for one in folders] or [none], ids=lambda path: f"at {path}")


def class_in(file: Path, name: str) -> ast.ClassDef:
    found = next((one for one in parsed(file).body if isinstance(one, ast.ClassDef) and one.name == name), None)
    assert found is not None, f"{file} has no class {name}"
    return found


def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def methods(one: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {item.name: item for item in one.body if isinstance(item, ast.FunctionDef)}


def is_abstract(method: ast.FunctionDef) -> bool:
    return any("abstractmethod" in ast.unparse(each) for each in method.decorator_list)


def parameters(method: ast.FunctionDef) -> list[str]:
    return [each.arg for each in (*method.args.posonlyargs, *method.args.args)]


def required(method: ast.FunctionDef) -> list[str]:
    names = parameters(method)
    return names[: len(names) - len(method.args.defaults)]


def imported(file: Path) -> Iterator[tuple[str, str]]:
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "vllm":
            yield from ((node.module, name.name) for name in node.names)


def defined(file: Path) -> set[str]:
    names: set[str] = set()
    for node in parsed(file).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {each.asname or each.name for each in node.names}
        elif isinstance(node, ast.Assign):
            names |= {ast.unparse(each) for each in node.targets}
        elif isinstance(node, ast.AnnAssign):
            names.add(ast.unparse(node.target))
    return names


@pytest.mark.parametrize("ours, theirs", OURS.items(), ids=lambda pair: pair[1])
def test_methods_take_what_vllm_gives(vllm, ours, theirs):
    mine = methods(class_in(HOSTS / ours[0], ours[1]))
    for name, method in methods(class_in(vllm / theirs[0], theirs[1])).items():
        assert not is_abstract(method) or name in mine, f"{ours[1]} lacks {name}"
        if name in mine and name != "__init__":
            given, taken = parameters(method), parameters(mine[name])
            assert taken[: len(given)] == given and len(required(mine[name])) <= len(given), f"{name}: {given}"


@pytest.mark.parametrize("theirs, fields", FIELDS.items(), ids=str)
def test_what_crosses_the_seam_has_its_fields(vllm, theirs, fields):
    found = class_in(vllm / theirs[0], theirs[1])
    names = [ast.unparse(item.target) for item in found.body if isinstance(item, ast.AnnAssign)]
    assert [name for name in names if name in fields] == list(fields)


def test_everything_that_is_imported_is_there(vllm):
    for file in sorted(HOSTS.glob("vllm*.py")):
        for module, name in imported(file):
            path = vllm.parent.joinpath(*module.split("."))
            found = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            assert name in defined(found) or (path / f"{name}.py").exists(), f"{file.name}: {module}.{name}"
