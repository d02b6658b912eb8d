"""Where weights may be read, by both dialects."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.partial_rollout.conftest import make_model
from tests.partial_rollout.service_helpers import make_stepped
from tests.trainer_adapter.server.helpers import save_model, served

from longtail.trainer_adapter.server.config import ServerConfig
from longtail.trainer_adapter.server.fields import BadRequest
from longtail.trainer_adapter.server.weights import INDEX, load_weights

DIALECTS = [
    ("/update_weights_from_disk", lambda path: {"model_path": path}, "model_path"),
    ("/update_weights", lambda path: {"weight_dir": path}, "weight_dir"),
    ("/update_weights", lambda path: {"update_info": {"path": path}}, "update_info.path"),
]


@pytest.fixture
def places(tmp_path: Path) -> dict[str, str]:
    """Two roots, weights in and outside of them, and links between the two."""
    new = make_model("llama", seed=1)
    outside = Path(save_model(new, tmp_path / "outside"))
    inside = Path(save_model(new, tmp_path / "root" / "step-1"))
    (tmp_path / "second").mkdir()
    (tmp_path / "root" / "leads-out").symlink_to(outside)
    (tmp_path / "leads-in").symlink_to(inside)
    (tmp_path / "root" / "step-2").mkdir()
    (tmp_path / "root" / "step-2" / "model.safetensors").symlink_to(outside / "model.safetensors")
    (tmp_path / "root" / "step-3").mkdir()
    (tmp_path / "root" / "step-3" / "model.safetensors").symlink_to(inside / "model.safetensors")
    (tmp_path / "root" / "round").symlink_to(tmp_path / "root" / "round")
    (tmp_path / "rooted").symlink_to(outside)  # begins with the root's name
    names = ("root/step-1", "root/step-2", "root/step-3", "root/leads-out", "root/round", "leads-in", "rooted")
    return {name: str(tmp_path / name) for name in (*names, "root", "second", "outside", "root/../outside")}


@pytest.mark.parametrize(("route", "body", "field"), DIALECTS, ids=[field for _, _, field in DIALECTS])
def test_only_below_the_roots(places: dict[str, str], route: str, body: Any, field: str) -> None:
    version = 0
    with served(make_stepped(), weights_roots=(places["second"], places["root"])) as server:
        for name in ("outside", "root/../outside", "root/leads-out", "root/step-2", "rooted"):
            answer = server.post(route, body(places[name]))
            assert (answer.status_code, answer.json()["error"]["param"]) == (403, field), name
            assert places["root"] in answer.json()["error"]["message"]
        # what is not there is not told apart from what is
        assert server.post(route, body(places["outside"] + "/none")).status_code == 403
        for name in ("root/round", "root"):  # in a circle; no weights there
            assert server.post(route, body(places[name])).status_code == 400
        assert server.service.stats().version == 0
        for name in ("root/step-1", "leads-in", "root/step-3"):
            answer, version = server.post(route, body(places[name])), version + 1
            assert answer.status_code == 200, answer.text
            assert server.service.stats().version == version


def test_an_index_that_leads_out_is_not_read(places: dict[str, str]) -> None:
    outside = Path(places["outside"], "secret")
    outside.write_text("not for you")
    Path(places["root/step-1"], INDEX).symlink_to(outside)
    with pytest.raises(BadRequest, match="may not be read") as refused:
        load_weights(places["root/step-1"], "path", (places["root"],))
    assert refused.value.status == 403


def test_without_roots(places: dict[str, str]) -> None:
    """On a loopback address anything, elsewhere nothing."""
    for host in ("127.0.0.1", "127.8.0.1", "::1", "localhost"):
        assert load_weights(places["outside"], "path", ServerConfig(host=host).readable)
    for host in ("0.0.0.0", "::", "10.0.0.7", "trainer-3"):
        with pytest.raises(BadRequest, match="--weights-root DIR") as refused:
            load_weights(places["outside"], "path", ServerConfig(host=host).readable)
        assert (refused.value.status, refused.value.field) == (403, "path")
        assert load_weights(places["outside"], "path", ServerConfig(host=host, weights_roots=("/",)).readable)


@pytest.mark.parametrize("roots", [("/nowhere/at/all",), "/", (7,)])
def test_roots_that_are_none(roots: Any) -> None:
    with pytest.raises(ValueError, match="weights_roots"):
        ServerConfig(weights_roots=roots)
