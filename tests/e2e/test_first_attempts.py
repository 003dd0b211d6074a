"""What a new user does from a folder beside the clone, at the first attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hub import Hub, serving
from tests.pages import Block, checkout, run
from tests.runs import rows_of
from tests.world import ROOT

pytestmark = pytest.mark.e2e


@pytest.mark.slow
@pytest.mark.large
def test_a_model_by_name_trains_and_resumes_without_network(tmp_path: Path) -> None:
    """Two ranks ask for the weights once; the second start asks for nothing."""
    checkout(tmp_path / "clone", is_warm=True)
    folder, model = tmp_path / "proj", ROOT / "r3" / "assets" / "tiny-moe"
    folder.mkdir()

    def started(url: str, steps: int) -> str:
        script = (
            f"export HF_HUB_CACHE={tmp_path / 'cache'} HF_ENDPOINT={url}\n"
            "../clone/launch/local.sh tiny-smoke --model.path hub:owner/tiny --eval.path '' "
            f"--rollout.prompts_per_step 4 --train.steps {steps} --log.dir runs/hub"
        )
        return run(Block(page="proj", line=1, script=script), folder)

    with serving(Hub({"owner/tiny": {"main": model}})) as hub:
        assert started(hub.url, 1).count("downloading hub:owner/tiny") == 1
        sizes = {file.name: file.stat().st_size for file in model.iterdir()}
        assert dict(hub.sent) == sizes, "each file once"
    assert "after step 1" in started("http://127.0.0.1:9", 2)
    assert [row["step"] for row in rows_of(folder / "runs" / "hub")] == [1, 2]
    assert "path: hub:owner/tiny" in (folder / "runs" / "hub" / "config.yaml").read_text()
