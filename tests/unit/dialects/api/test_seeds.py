from caravan_dialects.api.generation.checks import choice_seed
from caravan_proto.messages.sampling import MAX_SEED


def test_the_first_choice_has_the_seed_of_the_request() -> None:
    assert [choice_seed(seed, 0) for seed in (0, 1, MAX_SEED)] == [0, 1, MAX_SEED]


def test_other_choices_have_outputs_of_splitmix64() -> None:
    # The reference implementation returns these numbers for the seeds 0 and 1234567.
    assert [choice_seed(0, index) for index in (1, 2, 3)] == [
        0xE220A8397B1DCDAF,
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert [choice_seed(1234567, index) for index in (1, 2)] == [6457827717110365317, 3203168211198807973]


def test_small_seeds_and_indices_give_different_seeds() -> None:
    seeds = [choice_seed(seed, index) for seed in range(300) for index in range(1, 33)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed <= MAX_SEED for seed in seeds)
    # No other choice has the seed of a first choice.
    assert not set(seeds) & set(range(300))
