"""What a forked child must leave to its parent: files, sockets, and locks that a thread of the parent holds for ever.

In a child nothing of it can be used: whoever tries gets a StoreError, before any lock is touched.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, NoReturn

from kvstore.errors import StoreError

_owners: weakref.WeakKeyDictionary[Any, tuple[str, dict[str, Any]]] = weakref.WeakKeyDictionary()
_left: list[dict[str, Any]] = []  # in a child, to its end: what is the parent's must not be collected, and so closed


def leave_to_parent(owner: Any, what: str, **in_child: Any) -> None:
    """Make `owner` unusable in forked children: of its attributes only texts and bytes stay.

    what: its name in the error. in_child: attributes that have these values there, such as that it is closed. An owner
    with a method `let_go` has it called first, to close descriptors that the child must not hold.
    """
    _owners[owner] = (what, in_child)


class _Inherited:
    """Replaces an attribute; any use raises."""

    def __init__(self, what: str) -> None:
        self._what = what

    def _refuse(self, *_: object) -> NoReturn:
        raise StoreError(f"{self._what} was opened before this process was forked; open it again here")

    __bool__ = __call__ = __enter__ = __exit__ = __iter__ = __len__ = __getitem__ = __contains__ = _refuse
    __getattr__ = __index__ = __truediv__ = __lt__ = __gt__ = _refuse


def _leave_all() -> None:
    for owner, (what, in_child) in list(_owners.items()):
        _left.append(dict(vars(owner)))
        if hasattr(owner, "let_go"):
            owner.let_go()
        inherited = _Inherited(what)
        kept = {name: value for name, value in _left[-1].items() if value is None or isinstance(value, str | bytes)}
        vars(owner).update({**dict.fromkeys(_left[-1], inherited), **kept, **in_child})


os.register_at_fork(after_in_child=_leave_all)
