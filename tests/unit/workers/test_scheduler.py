from services.engine.scheduler import ScheduledSequence, Scheduler
from services.engine.sequences.group import Group
from services.engine.sequences.sequence import Branch, Rules, Sequence

from .fakes import ticket


def group(number: int, length: int, *, num_computed: int = 0, num_blocks: int = 100) -> Group:
    asked = ticket(f"r{number}", range(length))
    rules = Rules.of(asked, 4, frozenset(), 1000)
    one = Sequence(
        rules, [Branch(0)], range(length), block_ids=range(num_blocks), num_computed=num_computed
    )
    return Group(asked, [one], spare=(), num_acquired=num_blocks)


def scheduler(*groups: Group, max_num_seqs: int = 8) -> Scheduler:
    made = Scheduler(max_num_batched_tokens=16, max_num_seqs=max_num_seqs)
    for one in groups:
        made.add(one)
    return made


def shares(batch: list[ScheduledSequence]) -> list[tuple[str, int]]:
    return [(run.group.key.removeprefix("h-"), run.num_tokens) for run in batch]


def test_prompts_that_fit_run_whole() -> None:
    made = scheduler(group(1, 10), group(2, 6))
    assert shares(made.next_batch()) == [("r1", 10), ("r2", 6)]


def test_order_decides_not_the_time_of_joining() -> None:
    made = scheduler(group(3, 2), group(1, 2), group(2, 2))
    assert [key for key, _ in shares(made.next_batch())] == ["r1", "r2", "r3"]


def test_a_long_prompt_alone_takes_its_chunk() -> None:
    """Without other requests no part of the step is reserved."""
    made = scheduler(group(1, 100))
    assert sum(run.num_tokens for run in made.next_batch()) == 16


def test_a_quarter_of_the_step_is_for_who_needs_least() -> None:
    made = scheduler(group(1, 100), group(2, 50), group(3, 3))
    assert shares(made.next_batch()) == [("r1", 12), ("r3", 3), ("r2", 1)]


def test_sequences_that_decode_come_before_prompts() -> None:
    """Also those that came later, and more of them than a quarter of the step."""
    decoding = [group(number, 9, num_computed=8) for number in range(2, 9)]
    prompt = group(1, 100)
    prompt.stop_after_draws()
    made = scheduler(prompt, *decoding)
    assert shares(made.next_batch()) == [*((f"r{number}", 1) for number in range(2, 9)), ("r1", 9)]


def test_a_prompt_has_a_place_beside_any_number_that_decode() -> None:
    decoding = [group(number, 9, num_computed=8) for number in range(1, 9)]
    made = scheduler(*decoding, group(9, 100))
    assert shares(made.next_batch())[-1] == ("r9", 9)
    assert scheduler(*decoding, group(9, 100), max_num_seqs=1).next_batch()[0].group.key == "h-r1"


def test_rows_are_limited() -> None:
    made = scheduler(*(group(number, 1) for number in range(1, 6)), max_num_seqs=3)
    assert [key for key, _ in shares(made.next_batch())] == ["r1", "r2", "r3"]


def test_a_row_without_a_slot_sits_out() -> None:
    made = scheduler(group(1, 9, num_computed=8, num_blocks=2), group(2, 3))
    assert shares(made.next_batch()) == [("r2", 3)]


def test_tokens_without_slots_wait() -> None:
    made = scheduler(group(1, 10, num_blocks=2))
    assert shares(made.next_batch()) == [("r1", 8)]
