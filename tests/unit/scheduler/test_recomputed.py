"""Why tokens of a prompt are computed: reasons that need more than one shard, request, model or tenant."""

from dataclasses import replace

from caravan_proto.messages.limits import Saving
from caravan_scheduler.actions import Start
from caravan_scheduler.core.generation import Tenant
from caravan_scheduler.core.recomputed import Part, Reason, Recomputed
from caravan_scheduler.events import Taken
from caravan_scheduler.known_prompts import MOST_COMPARED
from caravan_scheduler.scheduler import Scheduler
from caravan_testing.ledgers import SAVING, limits_of
from caravan_testing.requests import prompt_of
from caravan_testing.simulation import Simulation, simulation

ROOMY = limits_of(cells=4000, cells_per_sequence=4000, max_sequences=64)


def why(fleet: Simulation, request_id: int) -> Recomputed:
    (start,) = (one for one in fleet.sent(Start) if one.request_id == request_id)
    return start.recomputed


def reasons(fleet: Simulation, request_id: int) -> list[tuple[Reason, int]]:
    return [(part.reason, part.tokens) for part in why(fleet, request_id).parts]


def test_a_first_prompt_is_new_and_one_that_goes_on_is_new_behind_its_end() -> None:
    fleet = simulation(limits=ROOMY)
    first = fleet.complete(prompt_of(40), 3, ignore_eos=True)
    assert reasons(fleet, first) == [(Reason.NEW, 40)]
    second = fleet.complete(prompt_of(40) + tuple(fleet.received[first]) + (91,) * 9, 1)
    # The last of the three tokens was sampled, and never computed.
    assert why(fleet, second) == Recomputed((Part(Reason.NEW, 42, 10),), 42)


def test_a_changed_token_and_the_end_of_a_repeated_prompt() -> None:
    fleet = simulation(limits=ROOMY)
    prompt = prompt_of(40)
    fleet.complete(prompt, 1)
    changed = fleet.complete((*prompt[:30], 99, *prompt[31:]), 1)
    assert why(fleet, changed) == Recomputed((Part(Reason.DIFFERS, 30, 10),), 30)
    assert why(fleet, changed).differs_at == 30
    assert reasons(fleet, fleet.complete(prompt, 1)) == [(Reason.END, 2)]


def test_where_a_prompt_differs_is_known_to_a_block_once_nobody_holds_the_tokens() -> None:
    fleet = simulation(limits=ROOMY)
    prompt = prompt_of(64)
    fleet.complete(prompt, 1)
    fleet.flush("a")
    changed = fleet.complete((*prompt[:40], 99, *prompt[41:]), 1)
    assert why(fleet, changed) == Recomputed(
        (Part(Reason.EVICTED, 0, 32), Part(Reason.DIFFERS, 32, 32)), 32, is_exact=False
    )


def test_where_a_prompt_differs_is_known_to_a_block_if_many_begin_alike() -> None:
    fleet = simulation(limits=ROOMY)
    head = prompt_of(40)
    for seed in range(MOST_COMPARED):
        told = why(fleet, fleet.complete((*head, 90 + seed, *prompt_of(20, seed)), 1))
        assert (told.common, told.is_exact) == (40 if seed else 0, True)
    fleet.complete((*head, 88, *prompt_of(20)), 1)
    fleet.flush("a")
    told = why(fleet, fleet.complete((*head, 89, *prompt_of(20)), 1))
    assert told == Recomputed((Part(Reason.EVICTED, 0, 32), Part(Reason.DIFFERS, 32, 29)), 32, is_exact=False)


def test_where_a_prompt_differs_is_known_to_a_block_if_it_may_go_on_with_another_salt() -> None:
    fleet = simulation(limits=ROOMY)
    prompt = prompt_of(64)
    fleet.complete(prompt[:37], 1, namespace="one")
    fleet.complete((*prompt[:40], 99, *prompt[41:]), 1, namespace="two")
    fleet.flush("a")
    told = why(fleet, fleet.complete(prompt, 1, namespace="three"))
    assert (told.common, told.is_exact) == (37, False)


def test_all_that_generated_the_same_block_are_compared() -> None:
    fleet = simulation(limits=ROOMY)
    prompt = prompt_of(14)
    first = fleet.complete(prompt, 3, ignore_eos=True)
    second = fleet.complete(prompt, 30, ignore_eos=True)
    assert fleet.received[first] == fleet.received[second][:3]
    fleet.flush("a")
    told = why(fleet, fleet.complete((*prompt, *fleet.received[first][:2], 99, 98, 97), 1))
    assert (told.common, told.is_exact) == (16, False), "the second one's next token may be the same"


def test_a_prompt_that_goes_on_behind_a_loaded_prefix() -> None:
    fleet = simulation(limits=limits_of(cells=4000, cells_per_sequence=4000, max_sequences=1, **SAVING))
    prompt = prompt_of(1000)
    fleet.complete(prompt, 1)
    fleet.complete(prompt_of(300, seed=2), 1)  # takes the only place
    changed = fleet.complete((*prompt[:990], 99, *prompt_of(20, seed=3)), 1)
    assert why(fleet, changed) == Recomputed((Part(Reason.PART_OF_BLOCK, 976, 14), Part(Reason.DIFFERS, 990, 21)), 990)


def test_what_another_tenant_sent_is_never_compared() -> None:
    fleet = simulation(limits=ROOMY)
    fleet.complete(prompt_of(40), 1, tenant=Tenant(name="one"), namespace="one")
    other = fleet.complete(prompt_of(40), 1, tenant=Tenant(name="two"), namespace="two")
    assert reasons(fleet, other) == [(Reason.NEW, 40)]


def test_a_prefix_of_another_shard() -> None:
    fleet = simulation("a", limits=limits_of(cells=4000, cells_per_sequence=4000, max_sequences=1))
    fleet.complete(prompt_of(64), 1)
    fleet.join("b", ROOMY)
    fleet.drain("a")
    again = fleet.submit(prompt_of(64), 1)
    assert reasons(fleet, again) == [(Reason.OTHER_SHARD, 62), (Reason.END, 2)]
    assert not why(fleet, again).was_moved


def test_a_prefix_that_was_fetched_from_another_shard() -> None:
    saving = limits_of(cells=4000, cells_per_sequence=4000, max_sequences=1, **SAVING)
    limits = replace(saving, run_fingerprint="x")
    fleet = simulation("a", limits=limits)
    fleet.complete(prompt_of(1000), 1)
    fleet.tick(1.0)
    fleet.run()
    fleet.join("b", limits)
    fleet.drain("a")
    again = fleet.complete(prompt_of(1000) + (91,) * 20, 1)
    assert why(fleet, again).parts[0].start > 900
    assert why(fleet, again).was_moved


def test_a_prompt_that_is_computed_elsewhere_at_the_same_time() -> None:
    slow = limits_of(cells=1000, cells_per_sequence=1000, max_sequences=1, max_batch_tokens=16)
    fleet = simulation("a", limits=slow)
    fleet.submit(prompt_of(300), 1)
    fleet.advance("a", 2)
    fleet.join("b", ROOMY)
    second = fleet.submit(prompt_of(300), 1)
    assert reasons(fleet, second) == [(Reason.OTHER_SHARD, 32), (Reason.UNDER_WAY, 266), (Reason.END, 2)]


def test_a_cancelled_prompt_is_not_kept() -> None:
    fleet = simulation("a", limits=limits_of(max_batch_tokens=32))
    first = fleet.submit(prompt_of(100), 1)
    fleet.advance("a")
    fleet.cancel(first)
    fleet.run()
    again = fleet.complete(prompt_of(100), 1)
    assert why(fleet, again).parts[0].reason is Reason.NEVER_SAVED
    assert why(fleet, again).parts[-1].reason is Reason.NEW


def test_prompt_logprobs_that_nobody_has() -> None:
    fleet = simulation(limits=ROOMY)
    fleet.complete(prompt_of(40), 1)
    second = fleet.complete(prompt_of(40), 1, prompt_logprobs=True)
    assert reasons(fleet, second) == [(Reason.LOGPROBS, 38), (Reason.END, 2)]


def test_recurrent_state_that_was_saved_beyond_what_is_common() -> None:
    fleet = simulation(limits=limits_of(cells=4000, cells_per_sequence=4000, whole_only=True, saving=Saving.NOTHING))
    fleet.complete(prompt_of(100), 1)
    changed = fleet.complete((*prompt_of(64), 99, *prompt_of(64, seed=2)), 1)
    assert reasons(fleet, changed) == [(Reason.NEVER_SAVED, 64), (Reason.DIFFERS, 65)]


def test_a_model_with_other_weights_computes_what_the_one_before_had() -> None:
    fleet = simulation(limits=ROOMY)
    fleet.complete(prompt_of(40), 1)
    former = fleet.scheduler
    fleet.lose("a")
    fleet.scheduler = Scheduler(fleet.config, former)
    fleet.handle(Taken(()))
    fleet.join("a", ROOMY)
    again = fleet.complete(prompt_of(40) + (91,) * 5, 1)
    assert reasons(fleet, again) == [(Reason.NEW_WEIGHTS, 40), (Reason.NEW, 5)]


def test_the_oldest_prompts_of_a_tenant_are_forgotten() -> None:
    fleet = simulation(limits=ROOMY)
    fleet.complete(prompt_of(40), 1)
    fleet.flush("a")
    for seed in range(2, 131):
        fleet.complete((100 + seed, *prompt_of(20, seed)), 1, tenant=Tenant(name=""))
    assert reasons(fleet, fleet.complete(prompt_of(40), 1)) == [(Reason.NEW, 40)]
