"""The house rules that a machine can check: import arrows, no torch in the control plane, sizes."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = ("service", "engine", "kvstore", "kernels", "rope")  # each may import what stands to its right
FOLDERS = (*LAYERS, "bench", "tests")
ENGINE_USES_OF_KVSTORE = {
    "block", "commands", "pool", "config", "errors", "connector", "session_store", "private_folder",
}  # fmt: skip
CONTROL_PLANE = {
    "kvstore": "config errors block pool lookahead policy planner replay tier codec io_queue disk_tier session_store "
    "control store stats disk_open disk_env disk_check disk_walk disk_format disk_upkeep disk_index "
    "index_loader "
    "layout commands offline lookup saving splicing write_back cpu_tier connector session_record session_marker "
    "session_tables session_check session_storage categories conversation eviction history lookahead policy "
    "policy_file prefetch prefixes disk_reads return_model answer_store answer_tables sizing steering traces "
    "trace_formats replay_config virtual_io",
    "engine": "config request sampling_params outputs kv_cache_manager scheduler detokenizer recall recall_ids "
    "recall_lines wire wire_calls inbox step_loop output_processor stats",
}
HEAVY = {"torch", "transformers", "triton"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load"}
MAX_FUNCTION_LINES, MAX_FILE_LINES = 70, 500


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_name(path): path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in FILES.items()}


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(body: list[ast.stmt], inside_functions: bool) -> Iterator[ast.stmt]:
    """All statements that run: at import time, or with `inside_functions` ever. TYPE_CHECKING blocks never run."""
    for node in body:
        if is_type_checking(node):
            yield from statements(node.orelse, inside_functions)
            continue
        yield node
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not inside_functions:
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, field, []), inside_functions)
        for handler in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            yield from statements(handler.body, inside_functions)


def imported(name: str, inside_functions: bool) -> Iterator[str]:
    """Dotted names of what a module imports; `from a import b` gives a.b where that is a module of ours, and a."""
    package = name if FILES[name].name == "__init__.py" else name.rpartition(".")[0]
    for node in statements(TREES[name].body, inside_functions):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *base.split(".")])
                base = base.rstrip(".")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in FILES)


def with_parents(name: str) -> list[str]:
    """Importing a.b.c runs a and a.b too."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def heavy_imports(name: str) -> dict[str, list[str]]:
    """What of torch and the like importing a module loads, with the chain of modules that leads there."""
    found: dict[str, list[str]] = {}
    chains = {start: [start] for start in with_parents(name) if start in FILES}
    queue = list(chains)
    while queue:
        current = queue.pop()
        for target in imported(current, inside_functions=False):
            if target.split(".")[0] in HEAVY:
                found.setdefault(target, chains[current])
            for needed in with_parents(target):
                if needed in FILES and needed not in chains:
                    chains[needed] = [*chains[current], needed]
                    queue.append(needed)
    return found


def control_plane() -> list[str]:
    named = [f"{folder}.{stem}" for folder, stems in CONTROL_PLANE.items() for stem in stems.split()]
    service = [name for name in FILES if name.split(".")[0] == "service"]
    return [name for name in ["engine", "kvstore", *named, *service] if name in FILES]


def test_arrows_point_one_way():
    wrong = []
    for name in FILES:
        layer = name.split(".")[0]
        if layer not in LAYERS:
            continue
        allowed = LAYERS[LAYERS.index(layer) :]
        for target in imported(name, inside_functions=True):
            top = target.split(".")[0]
            if top in FOLDERS and top not in allowed and name != "kvstore.__main__":  # which is the command
                wrong.append(f"{name} imports {target}")
    assert wrong == []


def test_engine_uses_only_the_seam_of_kvstore():
    wrong = []
    for name in FILES:
        if name.split(".")[0] != "engine":
            continue
        for target in imported(name, inside_functions=True):
            parts = target.split(".")
            if parts[0] == "kvstore" and len(parts) > 1 and parts[1] not in ENGINE_USES_OF_KVSTORE:
                wrong.append(f"{name} imports {target}")
    assert wrong == []


@pytest.mark.parametrize("name", control_plane())
def test_the_control_plane_loads_no_torch(name):
    assert heavy_imports(name) == {}


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_packages_loads_no_torch():
    code = "import sys, engine, kvstore, service.cli; from kvstore import SamplingParams, CacheTiers; "
    assert python(code + "print(sorted({'torch', 'transformers'} & set(sys.modules)))") == "[]"


def test_transformers_works_beside_our_kernels_package():
    """`kernels` is also the name of a Hugging Face package, and transformers imports whatever answers to it."""
    code = "import kernels, transformers; from transformers import AutoModelForCausalLM, LlamaForCausalLM; "
    assert python(code + "print(kernels.__version__, LlamaForCausalLM.__name__)") == "0 LlamaForCausalLM"


def test_our_kernels_package_imports_nothing():
    assert list(imported("kernels", inside_functions=True)) == []


def test_nothing_that_runs_foreign_bytes():
    wrong = []
    for name, tree in TREES.items():
        modules = {target.split(".")[0] for target in imported(name, inside_functions=True)}
        wrong += [f"{name} imports {module}" for module in modules & FORBIDDEN_MODULES]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
                wrong.append(f"{name}:{node.lineno} calls {ast.unparse(node.func)}")
    assert wrong == []


def test_functions_and_files_stay_short():
    wrong = [f"{name} has {num} lines" for name, path in FILES.items() if (num := num_lines(path)) > MAX_FILE_LINES]
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    wrong.append(f"{name}.{node.name} has {length} lines")
    assert wrong == []


def num_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def test_every_module_says_what_it_owns():
    assert [name for name, tree in TREES.items() if not ast.get_docstring(tree)] == []


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/LOG.md"])
def test_documents_name_no_place_of_one_machine(name):
    found = re.findall(r"(?<![\w.~])/(?:work|home|root|opt|mnt|Users)/\S*", (ROOT / name).read_text())
    assert found == []


def test_constraints_are_plain_pins():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line)] == []
