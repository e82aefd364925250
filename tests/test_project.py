"""What README, Makefile and constraints promise."""

import importlib
import importlib.metadata
import importlib.util
import re
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from cbsql.cli import app
from cbsql.experiments import spec

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
DOCUMENTS += sorted(ROOT.glob("results/*/README.md"))

PRESETS = [spec.ATARI, spec.RAINBOW_ATARI, spec.MINATAR, spec.RAINBOW_MINATAR]
PRESETS += [spec.CARTPOLE, spec.RAINBOW_CARTPOLE, spec.OTHER, spec.RAINBOW_OTHER]

# What the text of a document presupposes before its first lines of Python.
BEFORE = {
    "counts.md": """
import numpy as np
from cbsql.counts import ExactCounter
counter, x = ExactCounter(), np.arange(3)
counter.update(x)
s = counter.state_dict()
""",
    "files.md": """
import gymnasium
from cbsql import CBSQL, TabularSQL, files
table = TabularSQL("cbsql/ChainWalk-v0").learn(5)
env = gymnasium.make("CartPole-v1")
model = CBSQL("MlpPolicy", env, buffer_size=100, learning_starts=10)
model.learn(20)
counter = model.temperature
""",
    "replay.md": """
import numpy as np
from gymnasium import spaces
from cbsql.replay import PrioritizedReplayBuffer
space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
buffer = PrioritizedReplayBuffer(64, space, spaces.Discrete(2), rng=np.random.default_rng(0))
obs = next_obs = np.zeros((1, 4, 84, 84), np.uint8)
for _ in range(8):
    buffer.add(obs, next_obs, np.zeros((1, 1)), np.zeros(1), np.zeros(1), [{}])
progress, td_errors = 0.5, lambda batch: batch.rewards
obs = next_obs = np.zeros((8, 4, 84, 84), np.uint8)
actions, rewards, dones, infos = np.zeros((8, 1), int), np.zeros(8), np.zeros(8), [{}] * 8
""",
}


def blocks(document, language):
    text = document.read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "document", [d for d in DOCUMENTS if blocks(d, "python")], ids=lambda d: d.name
)
def test_python_of_the_documents_runs(document, tmp_path):
    code = "\n".join([BEFORE.get(document.name, ""), *blocks(document, "python")])
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True)


def test_commands_of_the_readme_run(tmp_path):
    for line in commands(ROOT / "README.md"):
        command = shlex.split(line)
        if command[0] == "cbsql":
            program = Path(sys.executable).parent / command[0]
            subprocess.run([program, *command[1:]], cwd=tmp_path, check=True)


def commands(document):
    """The lines of its shell blocks, a loop standing for its first turn."""
    text = "\n".join(blocks(document, "sh")).replace("\\\n", " ")
    for name, values in re.findall(r"for (\w+) in ([^;]+);", text):
        text = text.replace(f"${name}", values.split()[0])
    lines = [line.split(" #")[0].strip() for line in text.splitlines()]
    return [line for line in lines if line and not re.match("for |done", line)]


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if commands(d)], ids=str)
def test_commands_of_the_documents_are_understood(document):
    """Most would take long: what they do, other tests run; here, whether such a command exists."""
    for line in commands(document):
        environment, program, *arguments = re.match(r"((?:\w+=\S+ )*)(\S+) ?(.*)", line).groups()
        arguments = shlex.split(*arguments)
        if program == "cbsql":
            command = typer.main.get_command(app)
            while hasattr(command, "commands") and arguments != ["--help"]:
                name, *arguments = arguments
                command = command.commands[name]
            if arguments != ["--help"]:
                command.make_context(name, arguments)  # refuses what it does not know
        elif program == "make":
            subprocess.run([program, *arguments, "--dry-run"], cwd=ROOT, check=True)
        elif program == "python" and arguments[0] == "-m":
            assert importlib.util.find_spec(arguments[1])
        elif program == "ray":
            ray = importlib.import_module("ray.scripts.scripts").cli
            ray.commands[arguments[0]].make_context(program, arguments[1:])
        elif program == "python":
            assert (ROOT / arguments[0]).is_file()
        else:  # SB3's own tests, which need its repository
            assert "pytest" in program
            assert environment


def test_code_quoted_in_the_method_is_the_code():
    for block in blocks(ROOT / "docs" / "method.md", "py"):
        name, *quoted = block.splitlines()
        lines = iter((ROOT / name.removeprefix("# ")).read_text().splitlines())
        assert quoted
        for line in quoted:
            assert line in lines, (name, line)  # in this order


def test_the_page_of_presets_has_their_values():
    text = (ROOT / "docs" / "presets.md").read_text()
    header, *rows = re.findall(r"^\| (.+) \|$", text.replace("| |", "|  |"), re.MULTILINE)
    columns = dict(zip(header.split(" | ")[1:], PRESETS, strict=True))
    shown = {row.split(" | ")[0]: [c.strip() for c in row.split("|")[1:]] for row in rows}
    known = set()
    for place, (title, base) in enumerate(columns.items()):
        network = base.settings.get("policy_kwargs", {})
        rainbow = "Rainbow" in title
        values = {
            **{name: value for name, value in base.settings.items() if name != "policy_kwargs"},
            **{
                name: getattr(base, name) for name in ("steps", "test_epsilon", "exploration_steps")
            },
            "eps": network.get("optimizer_kwargs", {}).get("eps"),
        }
        if "optimizer_class" in network:
            values["optimizer_class"] = network["optimizer_class"].__name__
        if rainbow:
            values |= dict.fromkeys(("exploration_steps", "exploration_final_eps"), "none")
            values["v_max"] = network.get("v_max", 10.0)
        known |= values.keys()
        for name, cells in shown.items():
            value = values.get(name)
            assert cells[place] == ("" if value is None else str(value)), (title, name)
    assert shown.keys() == known


def test_links_of_the_documents_exist():
    for document in DOCUMENTS:
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
        # Only of this environment: Ray, once imported, adds a folder with packages of its own.
        for distribution in importlib.metadata.distributions(path=[sysconfig.get_path("purelib")])
    }
    del installed["pip"], installed["cbsql"]
    loose = {
        name: version
        for name, version in installed.items()
        if name not in allowed or version not in allowed[name]
    }
    assert not loose
