"""`kimi-w4a8 ready` where no server of ours answers. tests/launch/test_docker_run.py waits for one that starts."""

from __future__ import annotations

from support.loopback import answering
from typer.testing import CliRunner

from kimi_w4a8_eagle3.base.errors import KimiError
from kimi_w4a8_eagle3.cli import app
from kimi_w4a8_eagle3.engine.process import free_port
from kimi_w4a8_eagle3.gateway.config import GatewayConfig
from kimi_w4a8_eagle3.recipe.schema import load_recipe, recipe_names


def refusal(ops_port: int) -> str:
    error = CliRunner().invoke(app, ["ready", "--port", str(ops_port - 1), "--timeout", "0"]).exception
    assert isinstance(error, KimiError)
    return error.what


def test_a_port_of_nobody_or_of_another_program_is_not_ready() -> None:
    assert refusal(free_port()) == "the server is not ready after 0 s: no answer"
    for body in (b"[]", b"<html>", b"{}"):
        with answering(lambda path, _, body=body: (200, body)) as url:
            assert "not ready" in refusal(int(url.rpartition(":")[2]))


def test_it_asks_the_port_of_the_packaged_recipes() -> None:
    assert {load_recipe(name).args["port"] for name in recipe_names()} == {GatewayConfig.port}
