"""The house rules that a machine can check: import arrows, no torch in the control plane, sizes, names, tests.

What breaks a rule today stands in a list. A list may only shrink: an entry that is no longer true fails, too.
"""

import ast
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from tests.support.tidy import (
    LAYERS,
    LINKED,
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    WAYS_BACK,
    House,
    bare_words,
    class_names_met_twice,
    decoders_made_late,
    floors,
    in_circles,
    long_files,
    long_functions,
    patches,
    private_reaches,
    re_exports,
    slots_beside_hbm,
    waits_by_themselves,
)

ROOT = Path(__file__).parent.parent
ARROWS = {  # sub-package: what it may import of its layer
    "kvstore": {
        "policy": "",
        "blocks": "policy",
        "tiers": "blocks",
        "disk": "tiers blocks policy",
        "memory": "blocks policy",
        "sessions": "remote disk tiers blocks",
        "admin": "sessions remote disk blocks",
        "store": "remote memory disk tiers blocks policy",
        "planning": "store memory disk tiers blocks policy",
        "remote": "disk tiers blocks policy",
        "hosts": "block_store disk blocks policy",
    },
    "engine": {
        "builtin": "",
        "core": "",
        "text": "core",
        "model": "core builtin",
        "ranks": "child process model core",
        "client": "ranks process model text core",
        "sessions": "turns client text core",
    },
    "service": {
        "settings": "",
        "http": "settings",
        "api": "http settings",
        "": "api http settings",
        "replicas": "server api http settings",
        "command": "server replicas api http settings",
    },
}
FREE = {  # what all sub-packages of a layer may import of its root
    "kvstore": {"config", "errors", "stats", "forks"},
    "engine": {"config", "outputs", "progress", "sampling_params"},
    "service": set(),
}
AGAINST_THE_ARROWS: set[str] = set()
IN_CIRCLES: set[str] = set()
MET_TWICE: set[str] = set()  # names of classes
BARE: set[str] = set()
WAITS: set[str] = set()
MAX_REACHES, MAX_PATCHES = 149, 97
ENGINE_USES_OF_KVSTORE = {  # the seam, the sessions, and the records that cross
    "blocks.holdings", "blocks.ids", "blocks.pool", "blocks.records", "config", "errors", "connector", "store.seam",
    "store.assembly", "policy.conversation", "memory.layout", "memory.ranked", "disk.directory",
    "sessions.store",
    "sessions.record", "sessions.check", "sessions.answers", "sessions.shared.leases",
    "sessions.shared.opening", "remote.names", "admin.commands", "admin.private_folder",
    "disk.check", "disk.env", "disk.opening", "disk.weights", "admin.control", "remote.kv_events", "owned_disk",
}  # fmt: skip
TENSORS = ("kvstore.kernels", "kvstore.rope", "kvstore.memory", "kvstore.engine.model", "bench", "tests")
ASSEMBLERS = {
    "kvstore.store.assembly", "kvstore.engine.client.local", "kvstore.engine.ranks.follower",
}  # fmt: skip
DECIDES = {  # beside tensors, without any
    "kvstore.memory.tier", "kvstore.rope.splice", "kvstore.engine.model.files", "kvstore.engine.model.tokenizer",
}  # fmt: skip
HEAVY = {"torch", "transformers", "triton"}
FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load"}


# -- imports ---------------------------------------------------------------------------------------------------------
def with_parents(name: str) -> list[str]:
    """Importing a.b.c runs a and a.b too."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts) + 1)]


def heavy_imports(house: House, name: str) -> dict[str, list[str]]:
    """What of torch and the like importing a module loads, with the chain of modules that leads there."""
    found: dict[str, list[str]] = {}
    chains = {start: [start] for start in with_parents(name) if start in house.files}
    queue = list(chains)
    while queue:
        current = queue.pop()
        for target in house.imported(current, inside_functions=False):
            if target.split(".")[0] in HEAVY:
                found.setdefault(target, chains[current])
            for needed in with_parents(target):
                if needed in house.files and needed not in chains:
                    chains[needed] = [*chains[current], needed]
                    queue.append(needed)
    return found


def control_plane() -> list[str]:
    return [
        name for name in House(ROOT).files if name in DECIDES or not (name.startswith(TENSORS) or name in ASSEMBLERS)
    ]


def place(house: House, name: str) -> tuple[str, str, str]:
    """Layer, sub-package in it ("" at its root), and the module's name below the layer."""
    parts = name.split(".")
    if parts[0] != "kvstore":
        return parts[0], "", ".".join(parts[1:])
    if len(parts) > 1 and parts[1] in LINKED:
        parts = parts[1:]
    is_package = len(parts) == 2 and name in house.files and house.files[name].name == "__init__.py"
    return parts[0], parts[1] if len(parts) > 2 or is_package else "", ".".join(parts[1:])


def against_the_arrows(house: House) -> set[str]:
    wrong = set()
    for name in house.files:
        layer, package, _ = place(house, name)
        if layer not in LAYERS or name in WAYS_BACK:
            continue
        for target in house.needed(name):
            to_layer, to_package, to_rest = place(house, target)
            if to_layer not in LAYERS[LAYERS.index(layer) :]:
                wrong.add(f"{name} -> {target}")
            elif to_layer == layer and to_package != package and layer in ARROWS:
                if package not in ARROWS[layer] or to_rest in FREE[layer] | {"", "__init__"}:
                    continue  # the root may import everything
                if (to_package or to_rest) not in ARROWS[layer][package].split():
                    wrong.add(f"{name} -> {target}")
    return wrong


def beside_the_seam(house: House) -> set[str]:
    """What the engine imports of kvstore beside what it may."""
    wrong = set()
    for name in house.files:
        if place(house, name)[0] == "engine":
            for target in house.needed(name):
                layer, _, rest = place(house, target)
                if layer == "kvstore" and rest and rest not in ENGINE_USES_OF_KVSTORE:
                    wrong.add(f"{name} -> {target}")
    return wrong


def under_other_names(house: House) -> set[str]:
    """Imports by the name of a folder, which is not what is installed."""
    found = {(name, target) for name in house.files for target in house.imported(name, inside_functions=True)}
    return {f"{name} imports {target}" for name, target in found if target.split(".")[0] in LINKED}


def runs_foreign_bytes(house: House) -> set[str]:
    wrong = set()
    for name, nodes in house.nodes.items():
        modules = {target.split(".")[0] for target in house.imported(name, inside_functions=True)}
        wrong |= {f"{name} imports {module}" for module in modules & FORBIDDEN_MODULES}
        for node in nodes:
            if isinstance(node, ast.Call) and ast.unparse(node.func) in FORBIDDEN_CALLS:
                wrong.add(f"{name} calls {ast.unparse(node.func)}")
    return wrong


def without_docstring(house: House) -> set[str]:
    return {name for name, tree in house.trees.items() if not ast.get_docstring(tree)}


RESOLVED_ELSEWHERE = {  # types in tables, of all of which decoders are made at import
    "kvstore.admin.commands: COMMANDS[command]",
    "kvstore.service.api.schema: type_",  # by the routes
    "kvstore.service.http.errors: self.body",
}
KNOWN = {  # rule: what breaks it today
    against_the_arrows: AGAINST_THE_ARROWS,
    beside_the_seam: set(),
    under_other_names: set(),
    in_circles: IN_CIRCLES,
    re_exports: set(),
    long_functions: set(),
    long_files: set(),
    class_names_met_twice: MET_TWICE,
    bare_words: BARE,
    slots_beside_hbm: set(),
    runs_foreign_bytes: set(),
    without_docstring: set(),
    decoders_made_late: RESOLVED_ELSEWHERE,
    waits_by_themselves: WAITS,
}


@pytest.fixture(scope="module")
def house() -> House:
    return House(ROOT)


@pytest.mark.parametrize("rule", KNOWN, ids=lambda rule: rule.__name__)
def test_the_house_keeps_the_rule(house, rule):
    found, known = rule(house), KNOWN[rule]
    assert sorted(found - known) == []
    assert sorted(known - found) == [], "these are obeyed by now: take them off the list"


@pytest.mark.parametrize(("count", "most"), [(private_reaches, MAX_REACHES), (patches, MAX_PATCHES)])
def test_tests_look_from_outside(house, count, most):
    found = count(house)
    assert found.total() <= most, f"{count.__name__} in {found.most_common(10)}"
    assert found.total() > most - 20, f"{found.total()} {count.__name__} are left: lower the ceiling to that"


@pytest.mark.parametrize("name", control_plane())
def test_the_control_plane_loads_no_torch(house, name):
    assert heavy_imports(house, name) == {}


def test_the_store_has_seven_floors(house, tmp_path):
    assert floors(house, "kvstore.store") == 7
    low = house_of(tmp_path, kvstore__store__a="", kvstore__store__b="from kvstore.store import a")
    assert floors(low, "kvstore.store") == 2


def test_there_is_one_name_to_install():
    assert [name for name in LINKED if (ROOT / "kvstore" / name).resolve() != ROOT / name] == []


def test_our_kernels_package_imports_nothing(house):
    assert house.imported("kvstore.kernels", inside_functions=True) == []


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_importing_the_packages_loads_no_torch():
    code = "import sys, kvstore.service.command.cli; from kvstore import SamplingParams, CacheTiers; "
    assert python(code + "print(sorted({'torch', 'transformers'} & set(sys.modules)))") == "[]"


def test_transformers_works_beside_our_kernels_package():
    """In a checkout `kernels` is found, which is also a package of Hugging Face that transformers imports."""
    from transformers import LlamaForCausalLM

    assert import_module("kernels").__version__ == "0" and LlamaForCausalLM.__name__ == "LlamaForCausalLM"


@pytest.mark.parametrize("name", ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "bench/LOG.md"])
def test_documents_name_no_place_of_one_machine(name):
    found = re.findall(r"(?<![\w.~])/(?:work|home|root|opt|mnt|Users)/\S*", (ROOT / name).read_text())
    assert found == []


def test_constraints_are_plain_pins():
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[A-Za-z0-9_.-]+==[0-9][0-9a-z.]*", line)] == []


# -- the rules find what breaks them -----------------------------------------------------------------------------------
def house_of(root: Path, **texts: str) -> House:
    """A small house: modules by their paths, with `__` for `/`."""
    for name, text in texts.items():
        path = root / f"{name.replace('__', '/')}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return House(root)


PLANTED = {
    against_the_arrows: [
        ({"kvstore__disk__a": "import kvstore.store.b", "kvstore__store__b": ""}, "kvstore.disk.a -> kvstore.store.b"),
        ({"kernels__a": "from kvstore.b import C", "kvstore__b": "C = 1"}, "kvstore.kernels.a -> kvstore.b"),
        ({"engine__a": "def f():\n    import bench.b", "bench__b": ""}, "kvstore.engine.a -> bench.b"),
    ],
    beside_the_seam: [
        ({"engine__a": "from kvstore.store import b", "kvstore__store__b": ""}, "kvstore.engine.a -> kvstore.store.b"),
    ],
    under_other_names: [({"service__a": "from engine.b import C"}, "kvstore.service.a imports engine.b")],
    in_circles: [
        (
            {
                "kvstore__a": "from kvstore import b",
                "kvstore__b": "def f():\n    import kvstore.c",
                "kvstore__c": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvstore.a import A",
                "kvstore__d": "import kvstore.a",
            },
            "kvstore.a kvstore.b kvstore.c",
        ),
    ],
    re_exports: [
        (
            {"kvstore__a": "from kvstore.b import C", "kvstore__b": "from kvstore.c import C", "kvstore__c": "C = 1"},
            "kvstore.a takes C from kvstore.b",
        ),
        (
            {"bench__a": "from kvstore import b\nb.C", "kvstore__b": "from kvstore.c import C", "kvstore__c": "C = 1"},
            "bench.a takes C from kvstore.b",
        ),
    ],
    long_functions: [({"tests__a": "def f():\n" + "    ...\n" * MAX_FUNCTION_LINES}, "tests.a.f")],
    long_files: [({"bench__a": "\n" * (MAX_FILE_LINES + 1)}, "bench.a")],
    class_names_met_twice: [({"kvstore__a": "class C: ...", "service__b": "class C: ..."}, "C")],
    bare_words: [({"kvstore__a": "class A:\n    def _take(self): ..."}, "kvstore.a._take")],
    slots_beside_hbm: [
        ({"kvstore__a": "def f(slot): ...", "engine__a": "def f(slot): ..."}, "kvstore.a.slot"),
        (
            {"kvstore__a": "f(slots=2)\nSlotState = part.num_slots"},
            "kvstore.a.SlotState kvstore.a.num_slots kvstore.a.slots",
        ),
        ({"kvstore__a": '@dataclass(slots=True)\nclass Some:\n    __slots__ = ("a", "slot")'}, ""),
    ],
    runs_foreign_bytes: [
        ({"kvstore__a": "import pickle"}, "kvstore.a imports pickle"),
        ({"kvstore__a": "import torch\ntorch.load('x')"}, "kvstore.a calls torch.load"),
    ],
    waits_by_themselves: [({"tests__a": "import time\nwhile not X:\n    time.sleep(1)"}, "tests.a")],
    decoders_made_late: [
        ({"kvstore__a": "def f(x):\n    return msgspec.json.decode(x, type=list[C])"}, "kvstore.a: list[C]"),
        ({"service__a": "def f():\n    return msgspec.msgpack.Decoder(C)"}, "kvstore.service.a: C"),
        (
            {
                "engine__a": "def f(x):\n    return msgspec.convert(x, C)",
                "engine__b": "Decoder(C)\nmsgspec.json.Decoder(C)\ndef f(x):\n    return msgspec.convert(x, C)",
            },
            "kvstore.engine.a: C",
        ),
    ],
    without_docstring: [({"kvstore__a": "'Says it.'", "kvstore__b": "X = 1"}, "kvstore.b")],
}


@pytest.mark.parametrize(
    ("rule", "texts", "expected"), [(rule, *case) for rule in KNOWN for case in PLANTED[rule]],
    ids=lambda value: getattr(value, "__name__", ""),
)  # fmt: skip
def test_a_rule_finds_what_breaks_it(rule, texts, expected, tmp_path):
    found = rule(house_of(tmp_path, **texts))
    assert " ".join(sorted(found)) == expected


def test_torch_is_found_behind_other_modules(tmp_path):
    texts = {"kvstore__a": "import kvstore.b", "kvstore__b": "import torch", "kvstore__c": "def f():\n    import torch"}
    house = house_of(tmp_path, **texts)
    assert heavy_imports(house, "kvstore.a") == {"torch": ["kvstore.a", "kvstore.b"]}
    assert heavy_imports(house, "kvstore.c") == {}


def test_reaches_and_patches_are_counted(tmp_path):
    text = "def test(self, monkeypatch, engine):\n    self._own, engine._lock, engine.__class__, os._exit\n"
    house = house_of(tmp_path, tests__a=text + "    monkeypatch.setattr(engine, 'x', 1)\n    setattr(engine, 'x', 1)")
    assert (private_reaches(house), patches(house)) == ({"tests.a": 1}, {"tests.a": 1})
