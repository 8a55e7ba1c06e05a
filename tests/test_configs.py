"""Every recipe in configs/ is read, says what it is for, and plans on the embedded data."""

from pathlib import Path

import pytest

from neuroflux.config import Config
from neuroflux.plan import main as plan

RECIPES = sorted((Path(__file__).parents[1] / "configs").glob("*.yaml"))


def test_there_are_recipes():
    assert len(RECIPES) >= 3


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
class TestRecipes:
    def test_it_is_read_and_explained(self, path):
        assert path.read_text().startswith("# ")
        assert Config.from_yaml(path).epochs >= 1

    def test_it_plans_on_the_embedded_data(self, path, workplace, capsys):
        assert plan([f"--config={path}", "--data=digits", "--data_root=root", "--limit_train=100"]) == 0
        assert "| block |" in capsys.readouterr().out
