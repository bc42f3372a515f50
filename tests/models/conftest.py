"""What many tests share: transformers, imported once, and the checkpoint that it reads."""

from __future__ import annotations

import warnings

import pytest


@pytest.fixture(scope="session")
def transformers():
    """The reference. Its import takes seconds, hence once and only where it is asked for."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its dependencies, at import
        import transformers

        transformers.LlamaForCausalLM  # noqa: B018  (the import proper happens here)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
