"""The parts that others import alone import nothing of ours."""

import ast
from pathlib import Path

import pytest

import cbsql

PACKAGE = Path(cbsql.__file__).parent


@pytest.mark.parametrize("room", ["operators.py", "temperature.py", "counts", "replay"])
def test_parts_that_plug_depend_on_no_other_room(room):
    own = {f"cbsql.{room.removesuffix('.py')}", "cbsql._jit"}
    path = PACKAGE / room
    for file in [path] if path.is_file() else path.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                inside = name.split(".")[0] == "cbsql"
                assert not inside or ".".join(name.split(".")[:2]) in own, (file.name, name)
