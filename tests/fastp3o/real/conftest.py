"""The tokenizer of the real model."""

import pytest
from transformers import PreTrainedTokenizerBase

from fastp3o.models.tokenizer import load_tokenizer
from tests.fastp3o.real.pretrained import MODEL


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(MODEL)
