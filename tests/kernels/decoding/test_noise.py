import torch

from fastp3o_kernels.decoding.noise import exponentials, random_bits, response_keys


def test_the_numbers_are_splitmix64s():
    """Those of the reference implementation (prng.di.unimi.it/splitmix64.c) from 1234567."""
    bits = random_bits(torch.tensor(1234567), torch.arange(5))
    assert [number % 2**64 for number in bits.tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def test_a_key_belongs_to_seed_prompt_and_response():
    keys = response_keys(3, torch.arange(1000), 4)
    assert keys.shape == (1000, 4)
    assert len(keys.unique()) == 4000
    assert torch.equal(response_keys(3, torch.tensor([7, 500]), 2), keys[[7, 500], :2])
    assert not torch.isin(response_keys(4, torch.arange(1000), 4), keys).any()
    assert response_keys(2**63 - 1, torch.arange(2), 1).shape == (2, 1)


def test_exponentials_are_exponential_and_independent():
    keys = response_keys(0, torch.arange(200), 1)[:, 0]
    steps = torch.arange(200) % 7
    numbers = exponentials(keys, steps, 512)
    assert numbers.dtype == torch.float64
    assert (numbers > 0).all()
    assert numbers.isfinite().all()
    n = numbers.numel()
    # Kolmogorov-Smirnov, 0.1% level.
    uniform = (1 - (-numbers).exp()).flatten().sort().values
    assert (uniform - torch.arange(n) / n).abs().max() < 1.95 / n**0.5
    # Between neighbours, and between the same lanes of other keys.
    for a, b in ((numbers[:, 1:], numbers[:, :-1]), (numbers[1:], numbers[:-1])):
        correlation = ((a - 1) * (b - 1)).mean()
        assert abs(correlation) < 4 / n**0.5


def test_they_depend_on_key_and_step_of_the_slot_alone():
    keys, steps = response_keys(0, torch.arange(5), 1)[:, 0], torch.tensor([0, 3, 1, 1, 9])
    numbers = exponentials(keys, steps, 64)
    assert torch.equal(exponentials(keys[[3, 1]], steps[[3, 1]], 64), numbers[[3, 1]])
    assert not (exponentials(keys, steps + 1, 64) == numbers).any()
