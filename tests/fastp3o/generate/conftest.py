"""Generation samples text: its tiny model is one that prefers printable characters."""

import pytest
from transformers import PreTrainedTokenizerBase

from tests.fastp3o.letters import save_letters


@pytest.fixture(scope="session")
def tiny_model(
    tiny_model: str, tokenizer: PreTrainedTokenizerBase, tmp_path_factory: pytest.TempPathFactory
) -> str:
    return save_letters(tiny_model, tokenizer, tmp_path_factory.mktemp("letters"))
