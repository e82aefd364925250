"""What imports what: parts can be had without the rest."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import cbsql

PACKAGE = Path(cbsql.__file__).parent


@pytest.mark.parametrize("room", ["operators.py", "temperature.py", "counts", "replay"])
def test_parts_that_plug_depend_on_no_other_room(room):
    own = {f"cbsql.{room.removesuffix('.py')}", "cbsql._jit", "cbsql._vector_math"}
    path = PACKAGE / room
    for file in [path] if path.is_file() else path.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                inside = name.split(".")[0] == "cbsql"
                assert not inside or ".".join(name.split(".")[:2]) in own, (file.name, name)


def test_the_package_alone_does_not_wait_for_torch():
    code = "import sys, cbsql.cli, gymnasium; gymnasium.spec('cbsql/ChainWalk-v0'); "
    code += "assert 'torch' not in sys.modules; from cbsql import CBSQL, TabularSQL; "
    code += "assert 'CBSQL' in dir(cbsql)"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="no attribute 'DQN'"):
        cbsql.DQN  # noqa: B018
