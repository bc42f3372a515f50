"""What is written about the configuration agrees with its classes."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from trioserve.cli.run import FLAG_HELP, FLAGS, run
from trioserve.config import Config, load
from trioserve.config.docs import render
from trioserve.config.keys import SECTIONS, all_keys, find_key

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_made_from_the_schema_as_it_is() -> None:
    page = (ROOT / "docs/config.md").read_text(encoding="utf-8")
    assert page == render(), "run python -m trioserve.config.docs > docs/config.md"


@pytest.mark.parametrize("key", all_keys(), ids=lambda key: key.dotted)
def test_every_key_is_described(key: object) -> None:
    from trioserve.config.keys import Key

    assert isinstance(key, Key)
    assert key.help.endswith((".", "`"))
    assert f"| `{key.name}` |" in render()


def test_every_section_has_a_title() -> None:
    for section, cls in SECTIONS.items():
        assert (cls.__doc__ or "").startswith(f"``[{section}]``: ")


@pytest.mark.parametrize("path", sorted(ROOT.glob("examples/*.toml")), ids=lambda p: p.name)
def test_examples_load(path: Path) -> None:
    load(path, env={}, overrides={})


def test_the_example_serves_the_default_model() -> None:
    loaded = load(ROOT / "examples/smollm2.toml", env={}, overrides={})
    assert loaded.config.model.source == Config().model.source


@pytest.mark.parametrize("flag", FLAGS)
def test_flags_offer_what_their_keys_take(flag: str) -> None:
    from trioserve.config.convert import expected

    dotted, metavar = FLAGS[flag]
    key = find_key(dotted)
    assert key is not None
    assert FLAG_HELP[flag]
    if metavar.startswith("["):
        choices = expected(key.type).replace(" or ", ", ").replace('"', "").split(", ")
        assert metavar == f"[{'|'.join(choices)}]"
    assert any(
        isinstance(option, click.Option) and flag in option.opts and option.metavar == metavar
        for option in run.params
    )
