from pathlib import Path

from tests.fastp3o.together import together


def test_processes_that_share_the_vocabulary_have_the_whole_heads_losses_and_gradients():
    done = together(Path(__file__).with_name("vocabulary_shards.py"), processes=3, longest=120)
    assert done.returncode == 0, done.stdout
