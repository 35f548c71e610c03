"""The house as `ast` sees it, and the rules that need no list of what is allowed.

A rule is a function of a `House` that returns what breaks it, one line each. The tables of arrows, the lists of what is
known and the tests stand in `tests/test_tidy.py`.
"""

import ast
from collections import Counter
from collections.abc import Iterator
from functools import cache, cached_property
from pathlib import Path

LAYERS = ("service", "engine", "kvstore", "kernels", "rope")  # each may import what stands to its right
LINKED = ("engine", "kernels", "rope", "service")  # by links in kvstore/, so that one name is installed
WAYS_BACK = {"kvstore", "kvstore.__main__"}  # the public names, looked up when they are asked for; the command
MAX_FUNCTION_LINES, MAX_FILE_LINES = 70, 500
DOCUMENTED = {
    "_exit",
    "_replace",
    "_asdict",
    "_fields",
    "_make",
}  # of os and of named tuples
BARE_WORDS = {"find", "take", "leave", "few", "nobodys", "unsure"}  # find what, take from whom, unsure of what?
Function = ast.FunctionDef | ast.AsyncFunctionDef


class House:
    """Every module below a root, by its dotted name. Their trees are made when they are asked for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.files = {
            self._module_name(path): path
            for folder in (*LAYERS, "bench", "tests")
            for path in sorted((root / folder).rglob("*.py"))
            if folder != "kvstore" or path.relative_to(root).parts[1] not in LINKED
        }

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {name: ast.parse(path.read_text(), str(path)) for name, path in self.files.items()}

    @cached_property
    def nodes(self) -> dict[str, list[ast.AST]]:
        return {name: list(ast.walk(tree)) for name, tree in self.trees.items()}

    @cached_property
    def _imported(self) -> dict[tuple[str, bool], list[str]]:
        return {
            (name, ever): [target for node in statements(tree.body, ever) for target in self.imports_of(name, node)]
            for name, tree in self.trees.items()
            for ever in (False, True)
        }

    def _module_name(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        return f"kvstore.{name}" if parts[0] in LINKED else name

    @property
    def product(self) -> list[str]:
        return [name for name in self.files if name.split(".")[0] == "kvstore"]

    @property
    def tests(self) -> list[str]:
        return [name for name in self.files if name.split(".")[0] == "tests" and "tidy" not in name]

    def imports_of(self, name: str, node: ast.stmt) -> Iterator[str]:
        """Dotted names of what a statement imports; `from a import b` gives a, and a.b where that is a module."""
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = self.base_of(name, node)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names if f"{base}.{alias.name}" in self.files)

    def base_of(self, name: str, node: ast.ImportFrom) -> str:
        base = node.module or ""
        if not node.level:
            return base
        package = name if self.files[name].name == "__init__.py" else name.rpartition(".")[0]
        parts = package.split(".")
        return ".".join([*parts[: len(parts) - node.level + 1], *base.split(".")]).rstrip(".")

    def imported(self, name: str, inside_functions: bool) -> list[str]:
        """What a module imports when it runs: at import time, or with `inside_functions` ever."""
        return self._imported[name, inside_functions]

    def needed(self, name: str) -> set[str]:
        """What a module imports of the house, ever or for type checkers; a package only where it is meant itself."""
        found = set()
        for node in self.nodes[name]:
            if isinstance(node, ast.Import | ast.ImportFrom):
                targets = list(self.imports_of(name, node))
                if isinstance(node, ast.ImportFrom) and len(targets) == len(node.names) + 1:
                    targets = targets[1:]
                found |= set(targets)
        return found & set(self.files)


def decoders_made_late(house: House) -> set[str]:
    """Types that a function of the product decodes as, and that its module has made no decoder of at import.

    msgspec looks into a type at its first use, and two threads that do so at once end the process.
    """
    late = set()
    for name, nodes in house.nodes.items():
        functions = [node for node in nodes if isinstance(node, Function)]
        inside = {call for function in functions for call in ast.walk(function) if isinstance(call, ast.Call)}
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        made = {ast.unparse(call.args[0]) for call in calls if call not in inside and _decodes(call) == "Decoder"}
        for call in inside if name.startswith("kvstore.") else ():
            types = [word.value for word in call.keywords if word.arg == "type"]
            types += {"convert": call.args[1:2], "Decoder": call.args[:1]}.get(_decodes(call), [])
            late |= {f"{name}: {kind}" for kind in map(ast.unparse, types) if _decodes(call) and kind not in made}
    return late


def _decodes(call: ast.Call) -> str:
    """The function of msgspec that is called, if it takes a type."""
    name = getattr(call.func, "attr", "")
    is_one = name in ("convert", "decode", "Decoder") and ast.unparse(call.func).startswith("msgspec.")
    return name if is_one else ""


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def statements(body: list[ast.stmt], inside_functions: bool) -> Iterator[ast.stmt]:
    """All statements that run: at import time, or with `inside_functions` ever. TYPE_CHECKING blocks never run."""
    for node in body:
        if is_type_checking(node):
            yield from statements(node.orelse, inside_functions)
            continue
        yield node
        if isinstance(node, Function) and not inside_functions:
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from statements(getattr(node, field, []), inside_functions)
        for handler in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            yield from statements(handler.body, inside_functions)


def length(node: ast.AST) -> int:
    return node.end_lineno - node.lineno + 1


# -- sizes -----------------------------------------------------------------------------------------------------------
def long_files(house: House) -> set[str]:
    return {name for name, path in house.files.items() if len(path.read_text().splitlines()) > MAX_FILE_LINES}


def long_functions(house: House) -> set[str]:
    return {
        f"{name}.{node.name}"
        for name, nodes in house.nodes.items()
        for node in nodes
        if isinstance(node, Function) and length(node) > MAX_FUNCTION_LINES
    }


def is_own(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


# -- imports ---------------------------------------------------------------------------------------------------------
def in_circles(house: House) -> set[str]:
    """Modules of the product that need themselves by way of others."""
    needs = {name: house.needed(name) & set(house.product) for name in house.product if name not in WAYS_BACK}
    found = set()
    for start in needs:
        reached, queue = set(), list(needs[start])
        while queue:
            current = queue.pop()
            if current not in reached:
                reached.add(current)
                queue += needs.get(current, ())
        if start in reached:
            found.add(start)
    return found


def floors(house: House, package: str) -> int:
    """The most modules of a package that stand on one another, each importing the next when it is imported."""

    @cache
    def height(name: str) -> int:
        below = (
            one
            for one in house.imported(name, inside_functions=False)
            if one.startswith(f"{package}.") and one in house.files
        )
        return 1 + max(map(height, below), default=0)

    return max(height(name) for name in house.files if name.startswith(f"{package}."))


def re_exports(house: House) -> set[str]:
    """Names that a module imports, or reads, from another one that has only imported them itself."""
    found = set()
    for name, nodes in house.nodes.items():
        modules: dict[str, str] = {}  # what a name stands for here
        for node in nodes:
            if not isinstance(node, ast.ImportFrom):
                continue
            base = house.base_of(name, node)
            for alias in node.names:
                if f"{base}.{alias.name}" in house.files:
                    modules[alias.asname or alias.name] = f"{base}.{alias.name}"
                elif base in house.files and alias.name in only_imported(house.trees[base]):
                    found.add(f"{name} takes {alias.name} from {base}")
        for node in nodes:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                owner = modules[node.value.id]
                is_module = f"{owner}.{node.attr}" in house.files
                if not is_module and node.attr in only_imported(house.trees[owner], ours=True):
                    found.add(f"{name} takes {node.attr} from {owner}")
    return found


def only_imported(tree: ast.Module, ours: bool = False) -> set[str]:
    """Names at the top of a module that are another one's; with `ours`, of this house."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (not ours or (node.module or "").split(".")[0] == "kvstore"):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


# -- names -----------------------------------------------------------------------------------------------------------
def class_names_met_twice(house: House) -> set[str]:
    nodes = [node for name in house.product for node in house.nodes[name]]
    counts = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return {name for name, count in counts.items() if count > 1}


def bare_words(house: House) -> set[str]:
    return {
        f"{name}.{node.name}"
        for name in house.product
        for node in house.nodes[name]
        if isinstance(node, Function) and node.name.strip("_") in BARE_WORDS
    }


def slots_beside_hbm(house: House) -> set[str]:
    """Names with `slot` in kvstore: that is a token's place in HBM; a block's place in the arena is an arena block."""
    return {
        f"{name}.{identifier}"
        for name in house.product
        if not name.startswith(tuple(f"kvstore.{link}" for link in LINKED))
        for node in house.nodes[name]
        for identifier in identifiers(node)
        if "slot" in identifier.lower() and identifier != "__slots__"
    }


def identifiers(node: ast.AST) -> Iterator[str]:
    """What a node names by itself, but not the `slots=True` of a dataclass."""
    if isinstance(node, ast.keyword) and node.arg == "slots" and ast.unparse(node.value) == "True":
        return
    for part in ("id", "attr", "arg", "name", "asname"):
        if isinstance(word := getattr(node, part, None), str):
            yield word


# -- tests -----------------------------------------------------------------------------------------------------------
def private_reaches(house: House) -> Counter[str]:
    """How often each test file names something private of an object that is not its own."""
    found: Counter[str] = Counter()
    for name in house.tests:
        for node in house.nodes[name]:
            if isinstance(node, ast.Attribute) and not is_own(node):
                is_private = node.attr.startswith("_") and not node.attr.startswith("__")
                found[name] += is_private and node.attr not in DOCUMENTED
    return found


def patches(house: House) -> Counter[str]:
    """How often each test file puts something else into a place of a module, a class or an object."""
    calls = [(name, node) for name in house.tests for node in house.nodes[name] if isinstance(node, ast.Call)]
    return Counter(name for name, call in calls if is_patch(ast.unparse(call.func)))


def is_patch(function: str) -> bool:
    return function.endswith((".setattr", ".delattr")) or function.startswith("mock.patch")


def waits_by_themselves(house: House) -> set[str]:
    """Tests with a loop that only sleeps until something is so: `tests/support/waiting.py` does that for all."""
    return {
        name
        for name in house.tests
        if name != "tests.support.waiting"
        for node in house.nodes[name]
        if isinstance(node, ast.While) and any(is_sleep(part) for part in node.body)
    }


def is_sleep(node: ast.stmt) -> bool:
    call = node.value if isinstance(node, ast.Expr) else None
    call = call.value if isinstance(call, ast.Await) else call
    return isinstance(call, ast.Call) and ast.unparse(call.func) in ("time.sleep", "asyncio.sleep")
