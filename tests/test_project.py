"""What README, Makefile and constraints promise."""

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", blocks("python"))
def test_python_of_the_readme_runs(block, tmp_path):
    subprocess.run([sys.executable, "-c", block], cwd=tmp_path, check=True)


@pytest.mark.parametrize("block", blocks("sh"))
def test_commands_of_the_readme_run(block, tmp_path):
    for line in filter(None, block.splitlines()):
        command = line.split("#")[0].split()
        if command[0] == "make":  # known to the Makefile; what they do, CI and other tests run
            subprocess.run([*command, "--dry-run"], cwd=ROOT, check=True, capture_output=True)
        else:
            assert command[0] == "cbsql"
            program = Path(sys.executable).parent / command[0]
            subprocess.run([program, *command[1:]], cwd=tmp_path, check=True)


def test_links_of_the_documents_exist():
    for document in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
            assert "://" in target or (document.parent / target).exists(), (document, target)


def test_every_installed_package_is_pinned():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    allowed = {
        canonicalize_name(pin.name): pin.specifier
        for pin in pins
        if pin.marker is None or pin.marker.evaluate()
    }
    installed = {
        canonicalize_name(distribution.name): distribution.version
        for distribution in importlib.metadata.distributions()
    }
    del installed["pip"], installed["cbsql"]
    loose = {
        name: version
        for name, version in installed.items()
        if name not in allowed or version not in allowed[name]
    }
    assert not loose
