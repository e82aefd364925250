"""Count-based temperature scheduling for maximum-entropy reinforcement learning.

Importing this registers the environments with Gymnasium. The learners are imported when they are
first asked for: Torch takes seconds, which a part that is used alone need not cost.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cbsql import _registration

if TYPE_CHECKING:
    from cbsql.deep import CBSQL, SQL, Munchausen, Rainbow
    from cbsql.tabular import TabularSQL

__all__ = ["CBSQL", "SQL", "Munchausen", "Rainbow", "TabularSQL"]

_registration.register()


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'cbsql' has no attribute {name!r}")
    home = "cbsql.tabular" if name == "TabularSQL" else "cbsql.deep"
    return getattr(import_module(home), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
