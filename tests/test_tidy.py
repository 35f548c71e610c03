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
LINKED = ("engine", "kernels", "rope", "service")  # by links in kvstore/, so that one name is installed
ARROWS = {  # sub-package: what it may import of its layer
    "kvstore": {
        "policy": "",
        "blocks": "policy",
        "disk": "blocks policy",
        "memory": "blocks policy",
        "sessions": "disk blocks",
        "admin": "sessions disk blocks",
        "store": "memory disk blocks policy",
        "planning": "store memory disk blocks policy",
        "remote": "disk blocks policy",
        "hosts": "disk blocks policy",
    },
    "engine": {
        "builtin": "",
        "core": "",
        "text": "core",
        "model": "core builtin",
        "sessions": "text core",
        "process": "sessions text core",
    },
    "service": {
        "settings": "",
        "http": "settings",
        "api": "http settings",
        "": "api http settings",
        "command": "server api http settings",
    },
}
FREE = {  # what all sub-packages of a layer may import of its root
    "kvstore": {"config", "errors", "stats", "forks"},
    "engine": {"config", "outputs", "sampling_params"},
    "service": set(),
}
WAYS_BACK = {"kvstore", "kvstore.__main__"}  # the public names, looked up when they are asked for; the command
KNOWN = {  # against the arrows; may only shrink
    "kvstore.engine.core.step_loop -> kvstore.engine.model.step.erasure",
    "kvstore.engine.core.step_loop -> kvstore.engine.model.step.runner",
    "kvstore.engine.core.step_loop -> kvstore.engine.model.step.waiting",
    "kvstore.engine.core.step_loop -> kvstore.engine.stats",
    "kvstore.engine.core.step_loop -> kvstore.engine.text.output_processor",
    "kvstore.engine.model.loading -> kvstore.engine.text.chat_template",
    "kvstore.engine.process.core -> kvstore.engine.engine",
    "kvstore.engine.process.core -> kvstore.engine.lifetime",
    "kvstore.engine.process.remote -> kvstore.engine.admin",
    "kvstore.engine.process.remote -> kvstore.engine.blocking",
    "kvstore.engine.process.remote -> kvstore.engine.engine",
    "kvstore.engine.process.remote -> kvstore.engine.model.files",
    "kvstore.engine.process.remote -> kvstore.engine.model.loading",
    "kvstore.engine.sessions.chat -> kvstore.engine.engine",
    "kvstore.engine.sessions.chats -> kvstore.engine.engine",
    "kvstore.engine.sessions.chats -> kvstore.engine.model.files",
    "kvstore.engine.sessions.recall -> kvstore.engine.model.files",
    "kvstore.engine.sessions.window -> kvstore.engine.engine",
    "kvstore.service.settings.engine_options -> kvstore.service.command.terminal",
    "kvstore.store.tiered -> kvstore.admin.control",
}
ENGINE_USES_OF_KVSTORE = {
    "blocks.ids", "blocks.pool", "config", "errors", "connector", "sessions.store", "admin.commands",
    "admin.private_folder",
}  # fmt: skip
TENSORS = ("kvstore.kernels", "kvstore.rope", "kvstore.memory", "kvstore.engine.model", "bench", "tests")
ASSEMBLERS = {
    "kvstore.store.tiered", "kvstore.engine.engine", "kvstore.engine.storage",
    "kvstore.engine.process.remote",  # loads the tokenizer, by the module that loads weights
}  # fmt: skip
DECIDES = {"kvstore.memory.tier", "kvstore.rope.splice", "kvstore.engine.model.files"}  # beside tensors, without any
HEAVY = {"torch", "transformers", "triton"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load"}
MAX_FUNCTION_LINES, MAX_FILE_LINES = 70, 500


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    return f"kvstore.{name}" if parts[0] in LINKED else name


FILES = {
    module_name(path): path
    for folder in FOLDERS
    for path in sorted((ROOT / folder).rglob("*.py"))
    if folder != "kvstore" or path.relative_to(ROOT).parts[1] not in LINKED
}
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
    return [name for name in FILES if name in DECIDES or not (name.startswith(TENSORS) or name in ASSEMBLERS)]


def place(name: str) -> tuple[str, str, str]:
    """Layer, sub-package in it ("" at its root), and the module's name below the layer."""
    parts = name.split(".")
    if parts[0] != "kvstore":
        return parts[0], "", ".".join(parts[1:])
    if len(parts) > 1 and parts[1] in LINKED:
        parts = parts[1:]
    is_package = len(parts) == 2 and name in FILES and FILES[name].name == "__init__.py"
    return parts[0], parts[1] if len(parts) > 2 or is_package else "", ".".join(parts[1:])


def every_import(name: str) -> set[str]:
    """Also what only type checkers see."""
    found = set(imported(name, inside_functions=True))
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = {f"{node.module}.{alias.name}" for alias in node.names} & set(FILES)
            found |= inner if len(inner) == len(node.names) else {node.module, *inner}
    return found


def against_the_arrows() -> set[str]:
    wrong = set()
    for name in FILES:
        layer, package, _ = place(name)
        if layer not in LAYERS or name in WAYS_BACK:
            continue
        for target in every_import(name):
            if target.split(".")[0] not in ("kvstore", "bench", "tests"):
                continue
            to_layer, to_package, to_rest = place(target)
            if to_layer not in LAYERS[LAYERS.index(layer) :]:
                wrong.add(f"{name} -> {target}")
            elif to_layer == layer and to_package != package and layer in ARROWS:
                if package not in ARROWS[layer] or to_rest in FREE[layer] | {"", "__init__"}:
                    continue  # the root may import everything
                if (to_package or to_rest) not in ARROWS[layer][package].split():
                    wrong.add(f"{name} -> {target}")
    return wrong


def test_arrows_point_one_way():
    found = against_the_arrows()
    assert sorted(found - KNOWN) == []
    assert sorted(KNOWN - found) == [], "these are obeyed by now: take them off the list"


def test_there_is_one_name_to_install():
    assert [name for name in LINKED if (ROOT / "kvstore" / name).resolve() != ROOT / name] == []
    imports = [(name, target) for name in FILES for target in every_import(name)]
    wrong = [f"{name} imports {target}" for name, target in imports if target.split(".")[0] in LINKED]
    assert wrong == []


def test_engine_uses_only_the_seam_of_kvstore():
    wrong = []
    for name in FILES:
        if place(name)[0] != "engine":
            continue
        for target in every_import(name):
            layer, _, rest = place(target) if target.split(".")[0] == "kvstore" else ("", "", "")
            if layer == "kvstore" and rest and rest not in ENGINE_USES_OF_KVSTORE:
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
    code = "import sys, kvstore.service.command.cli; from kvstore import SamplingParams, CacheTiers; "
    assert python(code + "print(sorted({'torch', 'transformers'} & set(sys.modules)))") == "[]"


def test_transformers_works_beside_our_kernels_package():
    """In a checkout `kernels` is found, which is also a package of Hugging Face that transformers imports."""
    code = "import kernels, transformers; from transformers import AutoModelForCausalLM, LlamaForCausalLM; "
    assert python(code + "print(kernels.__version__, LlamaForCausalLM.__name__)") == "0 LlamaForCausalLM"


def test_our_kernels_package_imports_nothing():
    assert list(imported("kvstore.kernels", inside_functions=True)) == []


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
