"""The table of sub-commands: true to the commands, and no import for a line of help."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kimi_w4a8_eagle3.cli import COMMANDS, app, load


@pytest.mark.parametrize("name", COMMANDS)
def test_the_table_says_what_the_command_says(name):
    assert (load(name).help or "").strip().splitlines()[0] == COMMANDS[name]


def test_the_list_of_commands_imports_none_of_them():
    code = "\n".join(
        (
            "import atexit, sys",
            "atexit.register(lambda: print([m for m in sys.modules if '.commands.' in m or m == 'torch']))",
            "from kimi_w4a8_eagle3.cli import main",
            "sys.argv = ['kimi', '--help']",
            "main()",
        )
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip().splitlines()[-1] == "[]", done.stderr


def test_a_misspelt_command_gets_the_nearest():
    result = CliRunner().invoke(app, ["serv"])
    assert result.exit_code == 2 and "Did you mean 'serve'?" in result.output
